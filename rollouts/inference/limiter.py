"""Concurrency limit for the requests to one server, fixed or adapted to the load that the server reports.

Invariant: a request enters only while fewer than ``limit`` are inside, first in first out. An adaptive limit increases
by a fixed step while requests wait for it and the server is not congested, and decreases by a factor while the server
queues requests or its KV cache is nearly full. A server that does not report its load is not limited.

This module does no I/O: callers query the load and pass it in.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import anyio
import attrs

__all__ = ["AdaptiveLimit", "Limiter", "Load", "read_load"]

FIRST_LIMIT = 32
STEP = 8
CUT = 0.7
KV_FULL = 0.9
"""KV cache usage above which the server is about to retract running requests."""
QUEUE_SHARE = 0.1
"""A queue of up to this share of the running requests is no congestion: it keeps the server busy."""
QUERY_SECONDS = 1.0


@attrs.frozen
class Load:
    """Load that a server reports, over all its ranks."""

    running: int
    waiting: int
    kv_use: float = 0.0
    """KV cache usage of the fullest rank, 0 to 1."""

    @property
    def total(self) -> int:
        return self.running + self.waiting

    @property
    def congested(self) -> bool:
        return self.waiting > QUEUE_SHARE * self.running or self.kv_use >= KV_FULL


def read_load(response: Any) -> Load | None:
    """Parse the response of ``/v1/loads``; ``None`` if it is something else."""
    ranks = response.get("loads") if isinstance(response, dict) else None
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        return None
    return Load(
        running=int(sum(_number(rank, "num_running_reqs") for rank in ranks)),
        waiting=int(sum(_number(rank, "num_waiting_reqs") for rank in ranks)),
        kv_use=max(_number(rank, "token_usage") for rank in ranks),
    )


def _number(rank: dict[str, Any], name: str) -> float:
    value = rank.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else 0.0


class Limiter:
    """First-in-first-out limit of concurrent requests.

    Args:
        limit: maximum inside; ``math.inf`` for no limit.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._waiting: deque[anyio.Event] = deque()
        self.inside = 0

    def __repr__(self) -> str:
        return f"<Limiter: {self.inside} inside of {self._limit:g}, {len(self._waiting)} waiting>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def limit(self) -> float:
        return self._limit

    @limit.setter
    def limit(self, limit: float) -> None:
        self._limit = limit
        self._admit()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot, and occupy it inside the context."""
        if self.inside < self._limit and not self._waiting:
            self.inside += 1
        else:
            admitted = anyio.Event()
            self._waiting.append(admitted)
            try:
                await admitted.wait()
            except BaseException:
                if admitted.is_set():  # admitted and cancelled in the same loop iteration
                    self._leave()
                else:
                    self._waiting.remove(admitted)
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self.inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.inside < self._limit:
            self.inside += 1
            self._waiting.popleft().set()


class AdaptiveLimit:
    """Additive increase and multiplicative decrease of the limit of a :class:`Limiter`, by the load of its server.

    The limit doubles until the first congestion; then it increases by :data:`STEP` per query, and is multiplied by
    :data:`CUT` under congestion: at most at every other query, since a decrease takes effect only as requests end.
    """

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.limiter.limit = FIRST_LIMIT
        self.load: Load | None = None
        self.own = 0
        """Requests of this client in the last load."""
        self.query_seconds = QUERY_SECONDS
        self.unsupported = False
        """Whether the server does not report its load."""
        self._doubling = True
        self._was_cut = False
        self._next_query = 0.0
        self._querying = False

    def __repr__(self) -> str:
        return f"<AdaptiveLimit: {self.limiter!r}, {self.load}>"

    @property
    def others(self) -> int:
        """Requests of other clients in the last load."""
        return 0 if self.load is None else max(0, self.load.total - self.own)

    def claim_query(self) -> bool:
        """Return whether the caller must query the load now, and pass it to :meth:`update`; one caller at a time."""
        if self.unsupported or self._querying or time.monotonic() < self._next_query:
            return False
        self._querying = True
        return True

    def end_query(self) -> None:
        """Schedule the next query, also after one that failed."""
        self._querying, self._next_query = False, time.monotonic() + self.query_seconds

    def update(self, load: Load | None) -> None:
        """Adapt the limit to a load; ``None`` if the server has no such route."""
        self.end_query()
        if load is None:
            self.unsupported, self.limiter.limit = True, math.inf
            return
        self.load, self.own = load, self.limiter.inside
        saturated = self.limiter.waiting > 0 and 2 * load.total >= self.own  # else the load is older than the requests
        if load.congested:
            self._doubling = False
            if not self._was_cut:
                self.limiter.limit = max(1, math.floor(min(self.limiter.limit, max(self.limiter.inside, 1)) * CUT))
            self._was_cut = not self._was_cut
        else:
            self._was_cut = False
            if saturated:
                self.limiter.limit = self.limiter.limit * 2 if self._doubling else self.limiter.limit + STEP
