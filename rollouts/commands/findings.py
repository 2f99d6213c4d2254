"""The printed findings of a verb that checks something.

Invariant: a long list is cut, and its cut is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rollouts.base.terminal import say

__all__ = ["say_first"]

_MOST = 20


def say_first(findings: Sequence[object], others: str = "more", *, file: TextIO | None = None) -> None:
    """Print the first findings, each on a line, and the number of the others."""
    for finding in findings[:_MOST]:
        say(finding, file=file)
    left = len(findings) - _MOST
    if left > 0:
        say(f"... and {left} {others}", file=file)
