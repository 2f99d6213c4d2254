"""Which worker serves which session.

Invariant: a session stays with its worker, whose prefix cache holds its tokens, until that worker fails it or has far
more to do than another. A new session goes to the worker with the least to do; one that just could not be reached is
asked last.

This module knows nothing of requests: it is told when one begins, ends, or finds nobody.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

import attrs

from rollouts.inference.limiter import AdaptiveLimit, Limiter
from rollouts.inference.pauses import Pause

__all__ = ["Worker", "Workers"]

SUSPECT_SECONDS = 10.0
MAX_SESSIONS = 1 << 16
SKEW_FACTOR = 2.0
SKEW_REQUESTS = 8
"""A session moves where its worker has more to do than ``SKEW_FACTOR`` times what the least loaded has, and so many
requests: computing its tokens again there is then cheaper than standing in line here."""


@attrs.define(eq=False)
class Worker:
    """One server of the model."""

    url: str = attrs.field(repr=False)
    name: str
    """The URL without credentials."""
    in_flight: int = 0
    assigned: int = attrs.field(default=0, repr=False)
    """How many times it was chosen."""
    suspect_until: float = attrs.field(default=0.0, repr=False)
    """``time.monotonic()`` until which others are preferred."""

    answered: float = attrs.field(default=0.0, repr=False)
    """``time.monotonic()`` of its last completion."""
    pause: Pause = attrs.field(
        default=attrs.Factory(lambda self: Pause(self.url, self.name), takes_self=True), repr=False
    )
    limiter: Limiter = attrs.field(factory=Limiter, repr=False)
    adaptive_limit: AdaptiveLimit | None = attrs.field(default=None, repr=False)
    """Moves the limit, where it adapts to the load of the server."""

    @property
    def load(self) -> int:
        """Requests in flight, those that wait here for a place, and those of other clients where they are known."""
        return (
            self.in_flight + self.limiter.waiting + (0 if self.adaptive_limit is None else self.adaptive_limit.others)
        )

    def suspect(self) -> None:
        """Say that it could not be reached."""
        self.suspect_until = time.monotonic() + SUSPECT_SECONDS


class Workers:
    """The servers of one model, and the sessions that stay with them; the least recently used are forgotten first."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.all = tuple(workers)
        self._sessions: OrderedDict[str, Worker] = OrderedDict()
        self.moved = 0
        """Sessions that left a worker that had far more to do than another."""

    def __repr__(self) -> str:
        return f"<Workers: {', '.join(f'{worker.name} {worker.in_flight} in flight' for worker in self.all)}>"

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer now."""
        return sum(worker.in_flight for worker in self.all)

    def of(self, session: str) -> Worker:
        """The worker of a session; the least loaded for a new one, and for a call without one."""
        if len(self.all) == 1:
            return self.all[0]
        worker = self._sessions.get(session)
        if worker is None:
            return self._assign(session, self.all)
        if self._is_skewed(worker):
            self.moved += 1
            return self._assign(session, self.all)
        self._sessions.move_to_end(session)
        return worker

    def _is_skewed(self, worker: Worker) -> bool:
        if worker.load <= SKEW_REQUESTS:
            return False
        now = time.monotonic()
        least = min((other.load for other in self.all if other.suspect_until <= now), default=worker.load)
        return worker.load > SKEW_FACTOR * least + SKEW_REQUESTS

    def instead_of(self, worker: Worker, session: str) -> Worker:
        """Move a session away from a worker that failed it; there may be no other."""
        others = [other for other in self.all if other is not worker]
        return self._assign(session, others) if others else worker

    def _assign(self, session: str, among: Sequence[Worker]) -> Worker:
        now = time.monotonic()
        worker = min(among, key=lambda one: (one.suspect_until > now, one.load, one.assigned))
        worker.assigned += 1
        if session:
            self._sessions[session] = worker
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return worker
