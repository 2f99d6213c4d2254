"""Columns of token ids and logprobs: read-only arrays.

Invariant: a column is checked and copied once, when it is packed; from then on it cannot change.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from rollouts.dtypes.lazy_numpy import np, npt

__all__ = [
    "LOGPROB_TOLERANCE",
    "LogprobColumn",
    "TokenColumn",
    "are_logprobs",
    "digest",
    "frozen",
    "is_frozen",
    "packed_logprobs",
    "packed_tokens",
]

TokenColumn: TypeAlias = "npt.NDArray[np.int32]"
LogprobColumn: TypeAlias = "npt.NDArray[np.float32]"


def packed_tokens(values: Iterable[int] | TokenColumn) -> TokenColumn:
    """Pack token ids into a read-only int32 column, shape ``(n,)``."""
    return _packed(values, np.int32)


def packed_logprobs(values: Iterable[float] | LogprobColumn) -> LogprobColumn:
    """Pack logprobs (natural logarithm) into a read-only float32 column, shape ``(n,)``."""
    return _packed(values, np.float32)


def digest(tokens: TokenColumn, start: int = 0) -> int:
    """CRC-32 of token ids as little-endian int32, continuing from the digest ``start`` of the ids before them."""
    as_sent = tokens.dtype.str == "<i4" and tokens.flags.c_contiguous
    return zlib.crc32((tokens if as_sent else np.ascontiguousarray(tokens, "<i4")).data, start)


LOGPROB_TOLERANCE = 1e-4
"""The largest valid logprob: rounding may lift one above 0. A logprob within the tolerance is stored as the server sent
it, not clipped to 0, so that the stored value equals the response bit by bit."""


def are_logprobs(values: LogprobColumn) -> npt.NDArray[np.bool_]:
    """Mask of the valid logprobs: finite numbers of at most :data:`LOGPROB_TOLERANCE`."""
    return np.isfinite(values) & (values <= LOGPROB_TOLERANCE)


def _packed(values: Any, dtype: Any) -> npt.NDArray[Any]:
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1:
        owns_data = values.flags.owndata or type(values.base) is bytes  # type: ignore[comparison-overlap]
        return values if owns_data and not values.flags.writeable else frozen(values.copy())
    array = np.asarray(values if isinstance(values, Sequence | np.ndarray) else list(values))
    kinds = "iu" if np.issubdtype(dtype, np.integer) else "iuf"
    if array.size and array.dtype.kind not in kinds:
        raise ValueError(f"a column of {np.dtype(dtype)} accepts numbers of that kind only, got {array.dtype}")
    column = array.astype(dtype)
    if column.ndim != 1:
        raise ValueError(f"a column has one dimension, got shape {column.shape}")
    if kinds == "iu" and array.size and array.dtype != dtype and not np.array_equal(column, array):
        raise ValueError(f"a token id fits {np.dtype(dtype)}, got {array.min()} to {array.max()}")
    return frozen(column)


Scalar = TypeVar("Scalar", bound="np.generic")


def is_frozen(column: npt.NDArray[Any]) -> bool:
    """Whether a column is known as immutable: neither it nor the array or bytes that it is a view of is writeable."""
    if column.flags.writeable:
        return False
    base: object = column.base
    return base is None or (not base.flags.writeable if type(base) is np.ndarray else type(base) is bytes)


def frozen(column: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Make a column read-only, in place, and return it."""
    column.flags.writeable = False
    return column
