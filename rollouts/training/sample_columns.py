"""Storage of a sample's columns and records, and the properties through which they are read.

Invariant: a packed column is a read-only array of its type. It reads as a read-only list, and so do the records of a
:class:`CompactRecord`; what user code assigned is returned as it is, until it is packed. This module knows of a sample
only the names of its slots.
"""

from __future__ import annotations

from typing import Any

from rollouts.dtypes import frozen, is_frozen
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError
from rollouts.training.compact_record import CompactRecord
from rollouts.training.read_only import ReadOnlyList, read_only, recently

__all__ = ["as_column", "column", "pack_column", "record"]


def column(name: str, doc: str) -> Any:
    """Property of a per-token column: the assigned value, and from ``Sample.pack`` on a read-only list."""
    slot = f"_{name}"

    def get(sample: Any) -> Any:
        stored = getattr(sample, slot)
        return _listed(stored, name) if isinstance(stored, np.ndarray) else stored

    def put(sample: Any, value: Any) -> None:
        setattr(sample, slot, as_column(value))

    return property(get, put, doc=doc)


def record(name: str, doc: str) -> Any:
    """Property of a string or a list: the assigned value, or a read-only copy from a :class:`CompactRecord`."""
    slot = f"_{name}"

    def get(sample: Any) -> Any:
        stored = getattr(sample, slot)
        return _decoded(stored, name) if type(stored) is CompactRecord else stored

    def put(sample: Any, value: Any) -> None:
        setattr(sample, slot, value)

    return property(get, put, doc=doc)


def _listed(packed: npt.NDArray[Any], name: str) -> Any:
    def unpack() -> ReadOnlyList:
        listed = ReadOnlyList((packed.view(np.int8) if packed.dtype == np.bool_ else packed).tolist())
        listed.name = f"Sample.{name}"
        return listed

    return recently((packed, name), unpack)


def _decoded(compact: CompactRecord, name: str) -> Any:
    return recently((compact, name), lambda: read_only(getattr(compact, name)(), f"Sample.{name}"))


def as_column(value: Any) -> Any:
    """Convert an array to a read-only one and other sequences to a list; lists and ``None`` stay as they are."""
    if isinstance(value, np.ndarray):
        return value if is_frozen(value) else frozen(value.copy())
    return value if isinstance(value, list) or value is None else list(value)


def pack_column(name: str, dtype: type, value: Any) -> npt.NDArray[Any]:
    """Return the value as a read-only array: itself if it is an array of that type, else a copy."""
    is_column = type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1
    if is_column and (dtype is not np.float32 or bool(np.isfinite(value).all())):
        return value  # type: ignore[no-any-return]
    try:
        plain = np.asarray(value)
        if plain.dtype.kind in "SUc":  # astype would read text, and drop the imaginary part of a number
            raise TypeError(f"got values of {plain.dtype}")
        packed: npt.NDArray[Any] = frozen(plain.astype(dtype))
        exact = len(plain) == 0 or bool((np.isfinite(packed) if dtype is np.float32 else packed == plain).all())
        types = {plain.dtype.type} if plain is value else {plain.dtype.type, *map(type, value)}
        exact = exact and (dtype is np.bool_ or types.isdisjoint({bool, np.bool_}))  # numpy reads True as 1
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"Sample.{name}: {error}; expected {_CONTENTS[np.dtype(dtype).name]}") from None
    if not exact or packed.ndim != 1:
        raise ConfigError.of(f"Sample.{name}", value, _CONTENTS[np.dtype(dtype).name])
    return packed


_CONTENTS = {
    "int32": "one list of token ids that fit 32 bits",
    "bool": "one list of 0 and 1",
    "float32": "one list of finite numbers",
}
