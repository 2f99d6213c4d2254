"""Conversion of any value to data that JSON and MessagePack can represent.

Invariant: encoding never fails on a user's metadata, whatever its own code does; a value without a plain form is
written as its ``repr``. An interrupt, an exit and a cancellation are not of the value, and propagate. This module knows
no file.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

__all__ = ["to_json", "to_msgpack", "to_plain"]

_TIMESTAMPS = (b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff")
"""Heads of MessagePack's timestamps, which lose the time zone."""
_MOST_LEVELS = 200
_OURS = (KeyboardInterrupt, SystemExit, asyncio.CancelledError)


def to_json(value: Any) -> bytes:
    """Encode a value as JSON."""
    return _encoded(msgspec.json.encode, value)


def to_msgpack(value: Any) -> bytes:
    """Encode a value as MessagePack."""
    encoded = _encoded(msgspec.msgpack.encode, value)
    if b"\xff" in encoded and any(head in encoded for head in _TIMESTAMPS):  # or in a number, where it changes nothing
        return msgspec.msgpack.encode(to_plain(value, keep_bytes=True))
    return encoded


def _encoded(encode: Callable[..., bytes], value: Any) -> bytes:
    try:
        return encode(value, enc_hook=_foreign)
    except _OURS:
        raise
    except BaseException:  # noqa: BLE001 - the encoder does not take the value, or code of the value raises
        return encode(to_plain(value, keep_bytes=True))


def _foreign(value: Any) -> Any:
    if isinstance(value, str):  # of a class of its own
        return str.__str__(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def to_plain(value: Any, *, keep_bytes: bool = False, around: tuple[int, ...] = ()) -> Any:
    """Convert to JSON types: keys as text, lone surrogates replaced, integers beyond 64 bits and bytes as text.

    Args:
        value: any value.
        keep_bytes: leave bytes as they are, for MessagePack.
        around: the ids of the values around this one; a value in itself, or in too many others, is only named.
    """
    if value is None or isinstance(value, bool | float) or (keep_bytes and isinstance(value, bytes)):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if id(value) in around or len(around) > _MOST_LEVELS:
        return f"<{type(value).__name__}>"
    inside = functools.partial(to_plain, keep_bytes=keep_bytes, around=(*around, id(value)))
    try:
        if isinstance(value, Mapping):
            return {inside(key if isinstance(key, str) else _text(key, str)): inside(value[key]) for key in value}
        if isinstance(value, list | tuple):
            return [inside(entry) for entry in value]
        if hasattr(value, "tolist"):
            return inside(value.tolist())
        return inside(msgspec.to_builtins(value, enc_hook=_foreign))  # as JSON writes it: dates, bytes, UUIDs, sets
    except _OURS:
        raise
    except BaseException:  # noqa: BLE001 - code of the value raises, or the value has no plain form
        return to_plain(_text(value, repr))


def _text(value: Any, form: Callable[[Any], str]) -> str:
    try:
        return form(value)
    except _OURS:
        raise
    except BaseException:  # noqa: BLE001 - code of the value
        return f"<{type(value).__name__} that cannot be printed>"
