"""The console of the verbs: rich, without control characters in its output.

Invariant: every text passes through :func:`rollouts.base.terminal.visible`; only the escape sequences of rich itself,
for colours and for the live panel, reach the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from rollouts.base.terminal import visible

__all__ = ["SafeConsole"]


class SafeConsole(Console):
    """A console that replaces control characters in everything that it renders."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Render as rich does; every text of it is safe."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
