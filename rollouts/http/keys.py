"""Keys of APIs in texts: an API may quote the key that it refuses, and no message of ours has it."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["hiding"]

_SHOWN = 8


def hiding(key: str | None) -> Callable[[str], str]:
    """Return a function of a message, which has ``***`` in place of the key.

    A longer key is found by its first 8 characters, since a shortened message has no more of it.
    """
    if not key:
        return str
    text = re.escape(key) if len(key) <= _SHOWN else rf"{re.escape(key[:_SHOWN])}[\w*-]*"
    pattern = re.compile(text)
    return lambda shown: pattern.sub("***", shown)
