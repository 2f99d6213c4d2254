"""A checksum inside a JSON text, so that whoever reads it later can tell whether it is what was written.

Invariant: of a text that :func:`sealed` made, no bit can change without :func:`is_sound` saying so, or without the text
being JSON no longer. The checksum is the last entry of the object, so that it covers every byte before it, and what
reads JSON reads the text as before. This module knows no file.
"""

from __future__ import annotations

import re
import zlib

__all__ = ["CHECKSUM", "is_sound", "sealed"]

CHECKSUM = "crc32"
"""The entry's name."""

_SEAL = re.compile(rb',(?:\n  )?"crc32": ?(\d{1,10})\n?\}\n\Z')
_LONGEST = 48
"""Bytes at the end of a text that hold its seal."""


def sealed(text: bytes) -> bytes:
    """A JSON object with at least one entry, on one line or indented by two, with its checksum; ends a line."""
    text = text.rstrip(b"\n")
    indented = text.endswith(b"\n}")
    body = text[: -2 if indented else -1]
    form = b',\n  "crc32": %d\n}\n' if indented else b',"crc32":%d}\n'
    return body + form % zlib.crc32(body)


def is_sound(text: bytes) -> bool | None:
    """Whether a text is as it was sealed; ``None`` if it has no checksum."""
    start = max(0, len(text) - _LONGEST)
    seal = _SEAL.search(text, start)
    if seal is None:
        return None
    return zlib.crc32(memoryview(text)[: seal.start()]) == int(seal[1])
