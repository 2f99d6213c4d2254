"""A checksum inside a JSON document, with which a reader detects changed bits.

Invariant: if any bit of a document from :func:`sealed` changes, :func:`is_sound` returns False or the document is no
longer JSON. The checksum is the last entry of the object, so it covers every byte before it, and
the document remains valid JSON. This module knows no file.
"""

from __future__ import annotations

import re
import zlib

__all__ = ["CHECKSUM", "is_sound", "sealed"]

CHECKSUM = "crc32"
"""Name of the checksum entry."""

_SEAL = re.compile(rb',?(?:\n  )?"crc32": ?(\d{1,10})\n?\}\n\Z')
_LONGEST = 48
"""Bytes at the end of a document to search for the checksum."""


def sealed(text: bytes) -> bytes:
    """Append the checksum and a newline to a JSON object, on one line or indented by two."""
    text = text.rstrip(b"\n")
    indented = text.endswith(b"\n}")
    body = text[: -2 if indented else -1]
    form = b',\n  "crc32": %d\n}\n' if indented else b'"crc32":%d}\n' if body == b"{" else b',"crc32":%d}\n'
    return body + form % zlib.crc32(body)


def is_sound(text: bytes) -> bool | None:
    """Whether a document matches its checksum; ``None`` if it has no checksum."""
    start = max(0, len(text) - _LONGEST)
    seal = _SEAL.search(text, start)
    if seal is None:
        return None
    return zlib.crc32(memoryview(text)[: seal.start()]) == int(seal[1])
