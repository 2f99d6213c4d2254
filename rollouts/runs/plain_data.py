"""Conversion of any value to data that JSON and MessagePack can represent.

Invariant: encoding never fails on a user's metadata; a value without a plain form is written as its ``repr``. This
module knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

__all__ = ["to_json", "to_msgpack", "to_plain"]

_TIMESTAMPS = (b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff")
"""Heads of MessagePack's timestamps, which lose the time zone."""


def to_json(value: Any) -> bytes:
    """Encode a value as JSON."""
    return _encoded(msgspec.json.encode, value)


def to_msgpack(value: Any) -> bytes:
    """Encode a value as MessagePack."""
    encoded = _encoded(msgspec.msgpack.encode, value)
    if any(head in encoded for head in _TIMESTAMPS):  # or in a text, where it changes nothing
        return msgspec.msgpack.encode(to_plain(value, keep_bytes=True))
    return encoded


def _encoded(encode: Callable[..., bytes], value: Any) -> bytes:
    try:
        return encode(value, enc_hook=_foreign)
    except (UnicodeEncodeError, OverflowError, TypeError):
        return encode(to_plain(value, keep_bytes=True), enc_hook=_foreign)


def _foreign(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def to_plain(value: Any, *, keep_bytes: bool = False) -> Any:
    """Convert to JSON types: keys as text, lone surrogates replaced, integers beyond 64 bits and bytes as text.

    ``keep_bytes`` leaves bytes as they are, for MessagePack.
    """
    if value is None or isinstance(value, bool | float) or (keep_bytes and isinstance(value, bytes)):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, Mapping):
        return {
            to_plain(key if isinstance(key, str) else str(key)): to_plain(entry, keep_bytes=keep_bytes)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_plain(entry, keep_bytes=keep_bytes) for entry in value]
    try:
        return to_plain(msgspec.to_builtins(value, enc_hook=_foreign))  # as JSON writes it: dates, bytes, UUIDs, sets
    except (OverflowError, TypeError, ValueError):
        return to_plain(_foreign(value))
