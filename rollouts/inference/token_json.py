"""Cache of each session's token ids as JSON text, so that a call encodes only its new ids.

Invariant: the text encodes exactly the ids of the call. Cached text is reused only if the sequence begins with the same
number of ids and the same CRC-32 (also the checksum by which a trajectory verifies its requests); any other sequence is
encoded in full. A read-only view of the same memory as in the last call, as of a trajectory that grows in place, is
trusted to begin with the same ids: a checksum would cost time in proportion to the history. Memory is bounded by size
and by age.

This module does not know requests, servers or the meaning of ids.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec

from rollouts.dtypes import digest
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError

__all__ = ["EncodedIds", "SequenceCache"]

_LARGEST_ID = 2**31 - 1


@attrs.define(eq=False)
class EncodedIds:
    """Token ids as JSON text."""

    pieces: Sequence[bytes | memoryview]
    """Consecutive parts of the comma-separated decimal ids."""
    count: int
    digest: int
    """CRC-32 of the ids as little-endian int32."""

    @property
    def text(self) -> bytes:
        """All pieces joined."""
        return b"".join(self.pieces)

    def move_into(self, body: bytes, start: int) -> None:
        """Replace the pieces by a view of a request body, so that the text is in memory only once.

        Args:
            body: request body that contains the text.
            start: offset of the text in ``body``.
        """
        stop = start + sum(map(len, self.pieces))
        self.pieces = (memoryview(body)[start:stop],)


@attrs.define(eq=False)
class _Entry:
    ids: EncodedIds
    size: int
    """Bytes of the text."""
    used: float
    owner: Callable[[], Any]
    """Weak reference to the array of which the sequence was a read-only view, if any."""
    layout: Any
    """Address, strides and dtype of that view."""


class SequenceCache:
    """Encodes sequences, and caches the last one of every session.

    Args:
        vocab_size: upper bound of ids; ``None`` if unknown.
        max_bytes: maximum size of the cached text; the least recently used session is evicted first.
        max_idle_seconds: sessions unused for longer are evicted, too. Most have ended; a session that continues is
            encoded in full, in about 8 ms for 100,000 ids.
    """

    def __init__(
        self, vocab_size: int | None = None, *, max_bytes: int = 512 << 20, max_idle_seconds: float = 60.0
    ) -> None:
        if vocab_size is not None and vocab_size < 1:
            raise ConfigError.of("vocab_size", vocab_size, "an integer >= 1, or None")
        self.vocab_size = vocab_size
        self.max_bytes = max_bytes
        self.max_idle_seconds = max_idle_seconds
        self._limit = _LARGEST_ID + 1 if vocab_size is None else min(vocab_size, _LARGEST_ID + 1)
        self.encoded = 0
        """Ids encoded so far, without those from cached text."""
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<SequenceCache: {len(self._entries)} sessions, {self._bytes / 2**20:.1f} MiB>"

    def __len__(self) -> int:
        return len(self._entries)

    def encode(self, tokens: Any, session: str = "") -> EncodedIds:
        """Encode a sequence; with a session, only the ids added since its last call.

        Args:
            tokens: ids, shape ``(n,)``, n >= 1.
            session: its name; empty for a sequence that will not be extended.

        Raises:
            ConfigError: an id is outside the vocabulary (it would crash SGLang 0.5.23), or ids are missing.
        """
        column = np.asarray(tokens)
        if column.ndim != 1 or column.size == 0 or column.dtype.kind not in "iu":
            shape = f"{column.dtype} of shape {column.shape}"
            raise ConfigError(f"tokens: got {shape}; expected integers of shape (n,), n >= 1")
        owner, layout = _view_of(column)
        entry = self._evict(session) if session else None
        ids = None if entry is None else _cached_prefix(entry, column, owner, layout)
        start, crc = (0, 0) if ids is None else (ids.count, ids.digest)
        if ids is None or start < len(column):
            new = column[start:]
            self.check(new, "tokens", start)
            text = msgspec.json.encode(new.tolist())[1:-1]
            pieces = (text,) if ids is None else (*ids.pieces, b",", text)
            ids = EncodedIds(pieces, len(column), digest(new, crc))
            self.encoded += len(new)
        if session:
            owner_ref = (lambda: None) if owner is None else weakref.ref(owner)
            self._store(session, _Entry(ids, sum(map(len, ids.pieces)), time.monotonic(), owner_ref, layout))
        return ids

    def check(self, ids: Any, field: str, start: int = 0) -> None:
        """Check that ids are inside the vocabulary.

        Raises:
            ConfigError: one is not; the message contains its position (counted from ``start``), the id and the limit.
                Not an EndpointError: nothing was sent, and the cause is a tokenizer of another model.
        """
        ids, limit = np.asarray(ids), self._limit
        if ids.dtype.str == "<i4" and ids.size and np.maximum.reduce(ids.view("<u4")) < limit:
            return  # as uint32, a negative id is above the limit
        if ids.size and (ids.min() < 0 or ids.max() >= limit):
            at = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
            raise ConfigError(
                f"{field}[{start + at}]: got id {int(ids[at])}; expected 0 <= id < {limit}"
                f"{'' if self.vocab_size is None else ' (vocab_size)'}: does the tokenizer belong to this model?"
            )

    def _evict(self, session: str) -> _Entry | None:
        entry = self._entries.pop(session, None)
        if entry is not None:
            self._bytes -= entry.size
        return entry

    def _store(self, session: str, entry: _Entry) -> None:
        self._entries[session] = entry
        self._bytes += entry.size
        while self._entries:
            oldest = next(iter(self._entries))
            if self._bytes <= self.max_bytes and entry.used - self._entries[oldest].used <= self.max_idle_seconds:
                break
            self._evict(oldest)


def _cached_prefix(entry: _Entry, column: Any, owner: Any, layout: Any) -> EncodedIds | None:
    """Return the cached ids if the sequence begins with them."""
    ids = entry.ids
    if ids.count > len(column):
        return None
    if owner is not None and owner is entry.owner() and layout == entry.layout:
        return ids
    return ids if digest(column[: ids.count]) == ids.digest else None


def _view_of(column: Any) -> tuple[Any, Any]:
    """Return the array of which ``column`` is a read-only view, and the layout of the view; ``None`` for no view."""
    owner = column.base
    if column.flags.writeable or not isinstance(owner, np.ndarray):
        return None, None
    return owner, (column.__array_interface__["data"][0], column.strides, column.dtype)
