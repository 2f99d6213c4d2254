"""Any value as plain data: what JSON and MessagePack can hold.

Invariant: a user's metadata may hold anything, and it never costs a finished sample: what has no plain form is written
as its ``repr``. This module knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

__all__ = ["to_json", "to_msgpack"]


def to_json(value: Any) -> bytes:
    """The value as JSON."""
    return _encoded(msgspec.json.encode, value)


def to_msgpack(value: Any) -> bytes:
    """The value as MessagePack."""
    return _encoded(msgspec.msgpack.encode, value)


def _encoded(encode: Callable[..., bytes], value: Any) -> bytes:
    try:
        return encode(value, enc_hook=_foreign)
    except (UnicodeEncodeError, OverflowError, TypeError):
        return encode(_plain(value), enc_hook=_foreign)


def _foreign(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _plain(value: Any) -> Any:
    """The value as JSON types only: keys as text, lone surrogates replaced, integers that fit 64 bits."""
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
