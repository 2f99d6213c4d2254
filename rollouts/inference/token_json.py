"""What was already encoded of each session's sequence, so that a further call encodes only its new ids.

Invariant: what is encoded is exactly what was asked for. Kept text is used only where it was made of as many ids with
the same checksum, the one by which a trajectory proves its requests; a sequence that did not merely grow is encoded
anew. A read-only view of the very memory that the call before viewed, as of a trajectory that grows in place, is taken
to begin with the same ids: looking through them again would cost each turn time in proportion to the history. Memory is
bounded, by size and by age.

This module knows nothing of requests, servers or what the ids mean.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np

from rollouts.errors import ConfigError

__all__ = ["EncodedIds", "SequenceCache"]

_LARGEST_ID = 2**31 - 1
_INT32, _UINT32, _ON_THE_WIRE = np.dtype(np.int32), np.dtype(np.uint32), np.dtype("<i4")


@attrs.define(eq=False)
class EncodedIds:
    """Token ids as they go over the wire."""

    pieces: Sequence[bytes | memoryview]
    """Decimal ids with commas between them, one piece right after the other."""
    count: int
    digest: int
    """CRC-32 of the ids as little-endian int32."""

    @property
    def text(self) -> bytes:
        """The pieces as one."""
        return b"".join(self.pieces)

    def move_into(self, body: bytes, start: int) -> None:
        """Let the text be the part of a request's body where it stands, so that it is in memory once only.

        Args:
            body: has the text, from ``start`` on.
            start: where.
        """
        stop = start + sum(map(len, self.pieces))
        self.pieces = (memoryview(body)[start:stop],)


def _nothing() -> None:
    return None


@attrs.define(eq=False)
class _Kept:
    ids: EncodedIds
    size: int
    """Of the text."""
    used: float
    owner: Callable[[], Any]
    """The array that the sequence was a read-only view of, if there was one and is one still."""
    place: Any
    """Where in its memory the sequence lay, and how."""


class SequenceCache:
    """Encodes sequences, and keeps the last one of every session.

    Args:
        vocab_size: ids must be below it; ``None`` where it is not known.
        max_bytes: what may be kept in all; the least recently used session goes first.
        max_idle_seconds: a session unused for longer goes, too.
    """

    def __init__(
        self, vocab_size: int | None = None, *, max_bytes: int = 512 << 20, max_idle_seconds: float = 900.0
    ) -> None:
        if vocab_size is not None and vocab_size < 1:
            raise ConfigError.of("vocab_size", vocab_size, "an integer >= 1, or None")
        self.vocab_size = vocab_size
        self.max_bytes = max_bytes
        self.max_idle_seconds = max_idle_seconds
        self._limit = _LARGEST_ID + 1 if vocab_size is None else min(vocab_size, _LARGEST_ID + 1)
        self.encoded = 0
        """Ids encoded so far; an id that was taken from kept text is not counted again."""
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<SequenceCache: {len(self._kept)} sessions, {self._bytes / 2**20:.1f} MiB>"

    def __len__(self) -> int:
        return len(self._kept)

    def encode(self, tokens: Any, session: str = "") -> EncodedIds:
        """Encode a sequence; with a session, only what it has grown by.

        Args:
            tokens: ids, shape ``(n,)``, n >= 1.
            session: its name; empty for a sequence that will not be extended.

        Raises:
            ConfigError: an id is not one of the vocabulary (a real server dies of it), or there are none.
        """
        column = np.asarray(tokens)
        if column.ndim != 1 or column.size == 0 or column.dtype.kind not in "iu":
            shape = f"{column.dtype} of shape {column.shape}"
            raise ConfigError(f"tokens: got {shape}; expected integers of shape (n,), n >= 1")
        owner, place = _place(column)
        kept = self._forget(session) if session else None
        ids = None if kept is None else _beginning(kept, column, owner, place)
        start, digest = (0, 0) if ids is None else (ids.count, ids.digest)
        if ids is None or start < len(column):
            new = column[start:]
            self.check(new, "tokens", start)
            new = np.ascontiguousarray(new, _ON_THE_WIRE)
            text = msgspec.json.encode(new.tolist())[1:-1]
            pieces = (text,) if ids is None else (*ids.pieces, b",", text)
            ids = EncodedIds(pieces, len(column), zlib.crc32(new.data, digest))
            self.encoded += len(new)
        if session:
            viewed = _nothing if owner is None else weakref.ref(owner)
            self._keep(session, _Kept(ids, sum(map(len, ids.pieces)), time.monotonic(), viewed, place))
        return ids

    def check(self, ids: Any, field: str, start: int = 0) -> None:
        """Check that ids are of the vocabulary.

        Raises:
            ConfigError: one is not; the message names its position (counted from ``start``), the id and the limit. It
                is no EndpointError: nothing was sent, and a tokenizer that does not belong to the model is a mistake
                in the set-up, not something that a server said about one request.
        """
        ids, limit = np.asarray(ids), self._limit
        if ids.dtype == _INT32 and ids.size and np.maximum.reduce(ids.view(_UINT32)) < limit:
            return  # a negative id is a large one there
        if ids.size and (ids.min() < 0 or ids.max() >= limit):
            at = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
            raise ConfigError(
                f"{field}[{start + at}]: got id {int(ids[at])}; expected 0 <= id < {limit}"
                f"{'' if self.vocab_size is None else ' (vocab_size)'}: does the tokenizer belong to this model?"
            )

    def _forget(self, session: str) -> _Kept | None:
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._bytes -= kept.size
        return kept

    def _keep(self, session: str, kept: _Kept) -> None:
        self._kept[session] = kept
        self._bytes += kept.size
        while self._kept:
            oldest = next(iter(self._kept))
            if self._bytes <= self.max_bytes and kept.used - self._kept[oldest].used <= self.max_idle_seconds:
                break
            self._forget(oldest)


def _beginning(kept: _Kept, column: Any, owner: Any, place: Any) -> EncodedIds | None:
    """What is kept, where a sequence begins with it."""
    ids = kept.ids
    if ids.count > len(column):
        return None
    if owner is not None and owner is kept.owner() and place == kept.place:
        return ids
    same = zlib.crc32(np.ascontiguousarray(column[: ids.count], _ON_THE_WIRE).data) == ids.digest
    return ids if same else None


def _place(column: Any) -> tuple[Any, Any]:
    """The array that a column is a read-only view of, and where it lies there, and how; ``None`` if it is none."""
    owner = column.base
    if column.flags.writeable or not isinstance(owner, np.ndarray):
        return None, None
    return owner, (column.__array_interface__["data"][0], column.strides, column.dtype)
