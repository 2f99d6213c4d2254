"""Values that can be stored: conversion of any value to JSON and MessagePack, and checks that it can be read again.

Invariant: encoding never fails on a user's value, whatever its code does; a value without a plain form is written as
its ``repr``. A value that passes :func:`check_readable` can be decoded. Interrupts, exits and cancellations
propagate. This module knows no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from rollouts.errors import ConfigError

__all__ = ["check_readable", "stable_json", "to_json", "to_msgpack", "to_plain"]

_TIMESTAMPS = (b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff")
"""Heads of MessagePack's timestamps, which lose the time zone."""
_MAX_DEPTH = 200
_MAX_CHECKED_DEPTH = 100
_SAFE_KEYS = frozenset({str, int, float, bool, type(None)})
_NOT_OF_THE_VALUE = (KeyboardInterrupt, SystemExit, asyncio.CancelledError)


def to_json(value: Any) -> bytes:
    """Encode a value as JSON."""
    return _encoded(msgspec.json.encode, value)


def stable_json(value: Any) -> bytes:
    """Encode a value as JSON that every process writes alike: of an object that JSON does not have, only its class."""
    for sort_keys in (True, False):  # keys of several types have no order
        with contextlib.suppress(Exception):  # code of the value raises, or the value contains itself
            return json.dumps(value, sort_keys=sort_keys, skipkeys=True, default=_stable).encode()
    return b""


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else type(value).__qualname__


def to_msgpack(value: Any) -> bytes:
    """Encode a value as MessagePack."""
    encoded = _encoded(msgspec.msgpack.encode, value)
    if b"\xff" in encoded and any(head in encoded for head in _TIMESTAMPS):  # or in a number, where it changes nothing
        return msgspec.msgpack.encode(to_plain(value, keep_bytes=True))
    return encoded


def _encoded(encode: Callable[..., bytes], value: Any) -> bytes:
    try:
        return encode(value, enc_hook=_foreign)
    except _NOT_OF_THE_VALUE:
        raise
    except BaseException:  # noqa: BLE001 - the encoder does not take the value, or code of the value raises
        return encode(to_plain(value, keep_bytes=True))


def _foreign(value: Any) -> Any:
    if isinstance(value, str):  # a subclass
        return str.__str__(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def to_plain(value: Any, *, keep_bytes: bool = False, around: tuple[int, ...] = ()) -> Any:
    """Convert to JSON types: keys as strings, lone surrogates replaced, integers beyond 64 bits and bytes as strings.

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
    if id(value) in around or len(around) > _MAX_DEPTH:
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
    except _NOT_OF_THE_VALUE:
        raise
    except BaseException:  # noqa: BLE001 - code of the value raises, or the value has no plain form
        return to_plain(_text(value, repr))


def _text(value: Any, form: Callable[[Any], str]) -> str:
    try:
        return form(value)
    except _NOT_OF_THE_VALUE:
        raise
    except BaseException:  # noqa: BLE001 - code of the value
        return f"<{type(value).__name__} that cannot be printed>"


def check_readable(name: str, value: Any) -> None:
    """Refuse lists and dicts that are nested deeper than an encoder can follow, and keys that cannot be decoded.

    Raises:
        ConfigError: there is such a list, dict or key. A list that contains itself is nested too deep.
    """
    level = [value] if isinstance(value, dict | list | tuple) and value else []
    for _ in range(_MAX_CHECKED_DEPTH):
        if not level:
            return
        for outer in level:
            if isinstance(outer, dict) and not _SAFE_KEYS.issuperset(map(type, outer)):
                _check_keys(name, outer)
        inside = [entry for outer in level for entry in (outer.values() if isinstance(outer, dict) else outer)]
        level = [*{id(entry): entry for entry in inside if isinstance(entry, dict | list | tuple)}.values()]
    if level:
        raise ConfigError(f"{name}: nested deeper than {_MAX_CHECKED_DEPTH} levels, or in itself")


def _check_keys(name: str, keys: Iterable[Any]) -> None:
    """Refuse a key that MessagePack writes as a map, such as an instance of an attrs class: it cannot be decoded."""
    for key in keys:
        try:
            encoded = msgspec.msgpack.encode({key: 0}, enc_hook=repr)
        except Exception:  # noqa: BLE001 - it is written as its repr
            continue
        try:
            msgspec.msgpack.decode(encoded)
        except msgspec.DecodeError:
            raise ConfigError.of(f"{name}, a key", key, "a string or a number") from None
