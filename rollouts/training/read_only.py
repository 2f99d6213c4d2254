"""Read-only lists and dicts, which a packed sample returns because an edit in place would be lost.

Invariant: each compares and encodes as the plain list or dict of the same entries; slices, copies and pickles are
plain. This module does not know samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["ReadOnlyDict", "ReadOnlyList", "read_only", "recently"]

Value = TypeVar("Value")
_PLAIN = {str, int, float, bool, type(None)}


def _refuse(self: ReadOnlyList | ReadOnlyDict, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(f"{self.name}: got an edit in place of packed values; expected an assignment of new ones")


class ReadOnlyList(list[Any]):
    """A list that cannot be changed; ``name`` is the field that errors report."""

    __slots__ = ("name",)
    name: str

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return list, (list(self),)

    append = clear = extend = insert = pop = remove = reverse = sort = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


class ReadOnlyDict(dict[Any, Any]):
    """A dict that cannot be changed; ``name`` is the field that errors report."""

    __slots__ = ("name",)
    name: str

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)

    clear = pop = popitem = setdefault = update = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse


def read_only(value: Any, name: str) -> Any:
    """Return lists and dicts, also nested ones, as read-only copies; other values as they are."""
    copy: ReadOnlyDict | ReadOnlyList
    if isinstance(value, dict):
        copy = ReadOnlyDict(value)
        for key, entry in value.items():
            if type(entry) not in _PLAIN:
                dict.__setitem__(copy, key, read_only(entry, name))
    elif isinstance(value, list):
        copy = ReadOnlyList([entry if type(entry) in _PLAIN else read_only(entry, name) for entry in value])
    else:
        return value
    copy.name = name
    return copy


_recent: tuple[tuple[Any, str, Any], ...] = ()


def recently(key: tuple[Any, str], unpack: Callable[[], Value]) -> Value:
    """Return the value of ``unpack``, or of one of the last few calls if it had the same immutable object and name.

    So a loop over ``sample.tokens[i]`` unpacks the column once, and the response and the messages decode the ids once.
    """
    global _recent  # replaced as a whole: threads see the old or the new tuple
    for owner, name, value in _recent:
        if owner is key[0] and name == key[1]:
            return value  # type: ignore[no-any-return]
    value = unpack()
    _recent = (*_recent[-3:], (*key, value))
    return value
