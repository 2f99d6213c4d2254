"""How many requests a server is sent at once, and how that number follows the server's own load.

Invariant: never more are inside than the limit was when they entered, first come first served. A limit that adapts
grows by a fixed step while it is what holds requests back and the server keeps up, and is cut by a factor where
requests queue there or its KV cache is nearly full; a server that does not tell its load is not limited.

This module knows no HTTP: it is told loads, and tells when it wants one.
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
"""Use of the KV cache from which on running requests are about to be thrown out and computed again."""
QUEUE_SHARE = 0.1
"""A queue of this share of what runs is none: it keeps the server busy."""
LOOK_SECONDS = 1.0


@attrs.frozen
class Load:
    """What a server says of its load, all its ranks together."""

    running: int
    waiting: int
    kv_use: float = 0.0
    """Of the fullest rank, 0 to 1."""

    @property
    def total(self) -> int:
        return self.running + self.waiting

    @property
    def congested(self) -> bool:
        return self.waiting > QUEUE_SHARE * self.running or self.kv_use >= KV_FULL


def read_load(answer: Any) -> Load | None:
    """What ``/v1/loads`` answered; ``None`` if it is no such answer."""
    ranks = answer.get("loads") if isinstance(answer, dict) else None
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
    """Lets so many in at once.

    Args:
        limit: how many; ``math.inf`` for all.
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
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and have it inside."""
        if self.inside < self._limit and not self._waiting:
            self.inside += 1
        else:
            turn = anyio.Event()
            self._waiting.append(turn)
            try:
                await turn.wait()
            except BaseException:
                if turn.is_set():  # admitted at the moment of being cancelled
                    self._leave()
                else:
                    self._waiting.remove(turn)
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
    """Moves the limit of a :class:`Limiter` after the loads of its server.

    It doubles until the server is congested for the first time; then it grows by :data:`STEP` a look, and is cut to
    :data:`CUT` of itself where the server is congested: at most every other look, since a cut shows as requests end.
    """

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.limiter.limit = FIRST_LIMIT
        self.load: Load | None = None
        self.mine = 0
        """Of the load, those that came from here."""
        self.look_seconds = LOOK_SECONDS
        self.deaf = False
        """The server does not tell its load."""
        self._doubling = True
        self._was_cut = False
        self._next_look = 0.0
        self._looking = False

    def __repr__(self) -> str:
        return f"<AdaptiveLimit: {self.limiter!r}, {self.load}>"

    @property
    def others(self) -> int:
        """Requests of other clients, when last seen."""
        return 0 if self.load is None else max(0, self.load.total - self.mine)

    def claim_look(self) -> bool:
        """Whether the caller is to look at the server's load now, and tell it by :meth:`seen`; asked by many."""
        if self.deaf or self._looking or time.monotonic() < self._next_look:
            return False
        self._looking = True
        return True

    def unseen(self) -> None:
        """The look came to nothing this time."""
        self._looking, self._next_look = False, time.monotonic() + self.look_seconds

    def seen(self, load: Load | None) -> None:
        """What the server says; ``None`` if it has no such route."""
        self.unseen()
        if load is None:
            self.deaf, self.limiter.limit = True, math.inf
            return
        self.load, self.mine = load, self.limiter.inside
        held_back = self.limiter.waiting > 0 and 2 * load.total >= self.mine  # else it has not seen what was sent
        if load.congested:
            self._doubling = False
            if not self._was_cut:
                self.limiter.limit = max(1, math.floor(min(self.limiter.limit, max(self.limiter.inside, 1)) * CUT))
            self._was_cut = not self._was_cut
        else:
            self._was_cut = False
            if held_back:
                self.limiter.limit = self.limiter.limit * 2 if self._doubling else self.limiter.limit + STEP
