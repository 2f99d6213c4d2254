"""Conversion of any value to data that JSON and MessagePack can represent.

Invariant: encoding never fails on a user's metadata; a value without a plain form is written as its ``repr``. This
module knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

__all__ = ["to_json", "to_msgpack"]


def to_json(value: Any) -> bytes:
    """Encode a value as JSON."""
    return _encoded(msgspec.json.encode, value)


def to_msgpack(value: Any) -> bytes:
    """Encode a value as MessagePack."""
    return _encoded(msgspec.msgpack.encode, value)


def _encoded(encode: Callable[..., bytes], value: Any) -> bytes:
    try:
        return encode(value, enc_hook=_foreign)
    except (UnicodeEncodeError, OverflowError, TypeError):
        return encode(_plain(value), enc_hook=_foreign)


def _foreign(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _plain(value: Any) -> Any:
    """Convert to JSON types: keys as text, lone surrogates replaced, integers beyond 64 bits as text."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, Mapping):
        return {_plain(key if isinstance(key, str) else str(key)): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return _plain(_foreign(value))
