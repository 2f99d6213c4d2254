"""Adaptation of the concurrency limit of a server to the load that the server reports.

Invariant: the limit increases by a fixed step while requests wait for it and the server is not congested, and decreases
by a factor while the server queues requests or its KV cache is nearly full. A server that does not report its load is
not limited.

This module does no I/O: callers query the load and pass it in.
"""

from __future__ import annotations

import math
import time
from typing import Any

import anyio
import attrs

__all__ = ["AdaptiveLimit", "Load", "read_load"]

FIRST_LIMIT = 32
STEP = 8
CUT = 0.7
KV_FULL = 0.9
"""KV cache usage above which the server is about to retract running requests."""
QUEUE_SHARE = 0.1
"""A queue of up to this share of the running requests is not congestion: it keeps the server busy."""
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
    """Parse the response of ``/v1/loads``; ``None`` for any other response."""
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


class AdaptiveLimit:
    """Additive increase and multiplicative decrease of the limit of a server, by its load.

    The limit doubles until the first congestion; then it increases by :data:`STEP` per query, and is multiplied by
    :data:`CUT` under congestion: at most at every other query, since a decrease takes effect only as requests end.
    """

    def __init__(self, limiter: anyio.CapacityLimiter) -> None:
        self.limiter = limiter
        self.limiter.total_tokens = FIRST_LIMIT
        self.load: Load | None = None
        self.own_requests = 0
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
        return 0 if self.load is None else max(0, self.load.total - self.own_requests)

    def claim_query(self) -> bool:
        """Return whether the caller must query the load now, and pass it to :meth:`update`; one caller at a time."""
        if self.unsupported or self._querying or time.monotonic() < self._next_query:
            return False
        self._querying = True
        return True

    def end_query(self) -> None:
        """Schedule the next query, also after a failed query."""
        self._querying, self._next_query = False, time.monotonic() + self.query_seconds

    def update(self, load: Load | None) -> None:
        """Adapt the limit to a load; ``None`` if the server does not report it."""
        self.end_query()
        if load is None:
            self.unsupported, self.limiter.total_tokens = True, math.inf
            return
        self.load, self.own_requests = load, self.limiter.borrowed_tokens
        saturated = (
            self.limiter.statistics().tasks_waiting > 0 and 2 * load.total >= self.own_requests
        )  # else the load is older than the requests
        if load.congested:
            self._doubling = False
            if not self._was_cut:
                self.limiter.total_tokens = max(
                    1, math.floor(min(self.limiter.total_tokens, max(self.limiter.borrowed_tokens, 1)) * CUT)
                )
            self._was_cut = not self._was_cut
        else:
            self._was_cut = False
            if saturated:
                self.limiter.total_tokens = (
                    self.limiter.total_tokens * 2 if self._doubling else self.limiter.total_tokens + STEP
                )
