"""The ``repr`` of a value, a key of a value, and a value with its sets in order, as every process writes them.

Invariant: the first is ``repr(value)`` if the value has neither a set nor the address of an object; the second is then
equal for the value and for what a stored run has of it. This module knows no data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import attrs
import msgspec

from rollouts.base.storable import to_json

__all__ = ["in_order", "stable_key", "stable_repr"]

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+(?=>)")
_CONTAINS_ITSELF: dict[type, str] = {list: "[...]", tuple: "(...)", dict: "{...}"}


def stable_key(value: Any) -> str:
    """Write a value as JSON with sorted keys, as it is read from a stored run; sets are in order.

    Sets, and keys of dicts, have no order if they have several types; they then stand as they are stored.
    """
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        value = msgspec.to_builtins(value, order="deterministic", enc_hook=_foreign)
    return json.dumps(json.loads(to_json(value)), sort_keys=True)


def in_order(value: Any) -> Any:
    """A set as a list in a fixed order, also in lists, tuples and dicts; a value that contains itself as it is."""
    try:
        return _in_order(value)
    except RecursionError:
        return value


def _in_order(value: Any) -> Any:
    kind = type(value)
    if kind in (set, frozenset):
        entries = [_in_order(entry) for entry in value]
        with contextlib.suppress(Exception):  # entries of several types have no order, or their code raises
            return sorted(entries)
        return sorted(entries, key=stable_repr)
    if kind in (list, tuple):
        return [_in_order(entry) for entry in value]
    return {key: _in_order(entry) for key, entry in value.items()} if kind is dict else value


def _foreign(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else stable_repr(value)


def stable_repr(value: Any) -> str:
    """Write a value as ``repr`` does, but a set in a fixed order, and an object with an address as its type.

    A set is also found in a list, a tuple, a dict, a dataclass, an attrs class and a named tuple, but not below some
    hundred levels: a value with more of them is written by ``repr``.
    """
    try:
        return _written(value, ())
    except RecursionError:
        return repr(value)


def _written(value: Any, around: tuple[int, ...]) -> str:
    """``around`` has the ids of the values around this one."""
    kind = type(value)
    if kind in (str, int, float, bool, type(None)):
        return repr(value)
    if id(value) in around:
        return _CONTAINS_ITSELF.get(kind, "...")

    def inside(entry: Any) -> str:
        return _written(entry, (*around, id(value)))

    if kind is list:
        return f"[{', '.join(map(inside, value))}]"
    if kind is tuple:
        return f"({', '.join(map(inside, value))}{',' * (len(value) == 1)})"
    if kind is dict:
        return f"{{{', '.join(f'{inside(key)}: {inside(entry)}' for key, entry in value.items())}}}"
    if kind in (set, frozenset) and value:
        entries = f"{{{', '.join(sorted(map(inside, value)))}}}"
        return entries if kind is set else f"frozenset({entries})"
    text = repr(value)
    if not isinstance(value, type) and text == _generated(value, repr):
        return _generated(value, inside)
    return text if isinstance(value, str | bytes) else _ADDRESS.sub("", text)


def _generated(value: Any, write: Callable[[Any], str]) -> str:
    """The ``repr`` that is generated for a class with fields; empty for other objects."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.repr]
    elif attrs.has(kind):
        names = [field.name for field in attrs.fields(kind) if field.repr is True]
    elif isinstance(value, tuple):
        names = [*getattr(kind, "_fields", ())]
    else:
        return ""
    entries = ", ".join(f"{name}={write(getattr(value, name))}" for name in names)
    return f"{kind.__name__ if isinstance(value, tuple) else kind.__qualname__}({entries})"
