"""Routing of sessions to workers.

Invariant: a session stays with its worker, whose prefix cache contains its tokens, until a request fails there or the
load is much higher than elsewhere. A new session goes to the least loaded worker; recently unreachable workers are the
last choice.

This module sends nothing: callers count requests and report failures.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import attrs

from rollouts.inference.pauses import Pause
from rollouts.inference.prefixes import namespace_after

if TYPE_CHECKING:
    from rollouts.inference.limiter import AdaptiveLimit

__all__ = ["Worker", "Workers"]

SUSPECT_SECONDS = 10.0
MAX_SESSIONS = 1 << 16
SKEW_FACTOR = 2.0
SKEW_REQUESTS = 8
"""A session moves if the load of its worker exceeds ``SKEW_FACTOR`` times the lowest load plus ``SKEW_REQUESTS``:
computing its tokens again elsewhere is then cheaper than waiting in the queue."""


@attrs.define(eq=False)
class Worker:
    """One server of the model."""

    url: str = attrs.field(repr=False)
    name: str
    """The URL without credentials."""
    in_flight: int = 0
    assigned: int = attrs.field(default=0, repr=False)
    """Number of sessions and calls assigned to it."""
    suspect_until: float = attrs.field(default=0.0, repr=False)
    """``time.monotonic()`` until which other workers are preferred."""
    unreachable: bool = attrs.field(default=False, repr=False)
    """Whether it was down at the last attempt; its weights are checked before it gets requests again."""
    polled: float = attrs.field(default=0.0, repr=False)
    """``time.monotonic()`` of the last poll whether it is back."""
    unanswered: dict[str, float] = attrs.field(factory=dict, repr=False)
    """``time.monotonic()`` of sending, by rid, of the requests that it has not answered, lost ones included."""
    answered: float = attrs.field(default=0.0, repr=False)
    """``time.monotonic()`` of its last completion."""
    versions: dict[str, float] = attrs.field(factory=dict, repr=False)
    """The weight versions of its replies, the present one last, and ``time.monotonic()`` of the first reply by each."""
    changed: tuple[float, str] = attrs.field(default=(0.0, ""), repr=False)
    """When replies showed its present weights, and the namespace of conversations since then (``prefixes.py``)."""
    pause: Pause = attrs.field(
        default=attrs.Factory(lambda self: Pause(self.url, self.name), takes_self=True), repr=False
    )
    limiter: anyio.CapacityLimiter = attrs.field(factory=lambda: anyio.CapacityLimiter(math.inf), repr=False)
    adaptive_limit: AdaptiveLimit | None = attrs.field(default=None, repr=False)
    """Adapts ``limiter`` to the load of the server; ``None`` for a fixed limit."""

    def served(self, version: str, sent: float) -> bool:
        """Record the version of a reply to a request of time ``sent``; return whether the server is back at it.

        Replies of earlier weights may arrive late: only a request sent after the first reply of others shows a return.
        """
        present, is_known = next(reversed(self.versions), version), version in self.versions
        if is_known and (version == present or sent <= self.versions[present]):
            return False
        if present != version:
            self.changed = time.monotonic(), namespace_after(self.versions[present], self.url, version)
        self.versions.pop(version, None)
        self.versions[version] = time.monotonic()
        return is_known

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self.limiter.statistics().tasks_waiting

    @property
    def load(self) -> int:
        """Requests in flight, waiting for a slot, and of other clients where they are known."""
        return self.in_flight + self.waiting + (0 if self.adaptive_limit is None else self.adaptive_limit.others)

    def is_sole_request(self, rid: str) -> bool:
        """Whether ``rid`` is the only unanswered request sent since the last answer: it probably caused a crash."""
        return [one for one, sent in self.unanswered.items() if sent > self.answered] == [rid]

    def suspect(self) -> None:
        """Mark it as unreachable for :data:`SUSPECT_SECONDS`."""
        self.suspect_until = time.monotonic() + SUSPECT_SECONDS


class Workers:
    """All workers of one model, with an LRU map of sessions to workers."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.all = tuple(workers)
        self._sessions: OrderedDict[str, Worker] = OrderedDict()
        self.moved = 0
        """Sessions moved because of skewed load."""

    def __repr__(self) -> str:
        return f"<Workers: {', '.join(f'{worker.name} {worker.in_flight} in flight' for worker in self.all)}>"

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered yet."""
        return sum(worker.in_flight for worker in self.all)

    def worker_for(self, session: str) -> Worker:
        """Return the worker of a session; the least loaded worker for a new session or no session."""
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

    def reassign(self, worker: Worker, session: str) -> Worker:
        """Move a session away from a worker on which it failed; a single worker keeps it."""
        others = [other for other in self.all if other is not worker]
        return self._assign(session, others) if others else worker

    def move(self, worker: Worker, session: str) -> Worker:
        """Assign a session to a worker."""
        return self._assign(session, (worker,))

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
