"""Workers that get no answer from the inference servers while other workers do.

Invariant: a worker is cut off only if another worker was answered meanwhile, or has no rollouts and may try. One try
is all until a server answers a worker: a worker that waits since the try, too, is not cut off. While every worker
waits, nothing is decided here: it is an outage, and the rule of :mod:`rollouts.inference.outages` holds in each worker.

A worker reports that its requests wait for a server, or that servers answered it. The manager's side compares the
reports. This module does not know transports, rollouts or requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import anyio

from rollouts.concurrency.deadlines import pauses
from rollouts.inference.shared import shared_policies

__all__ = ["CUT_OFF_SECONDS", "ServerReports", "Servers", "report_servers", "servers_now"]

CUT_OFF_SECONDS = 30.0
"""Wait for a server after which a worker is cut off if another one was answered meanwhile."""
_LOOK_SECONDS = 1.0
_LOOKS = 5
_OLDEST_ANSWER = 7.0
"""A report is sent every so many looks while answers come, so that an answer is not older when the report arrives."""
_PAUSE_SECONDS, _LONGEST_PAUSE = 10.0, 600.0
_LONGEST_REASON = 500
"""Most characters of a reason: a worker on a network may send anything."""

Servers: TypeAlias = tuple[str, int]
"""Why requests of this process wait for a server, empty if none does; and the number of answers so far."""


def servers_now() -> Servers:
    """The state of this process's shared policies."""
    away = next((pause.what for pause in pauses() if pause.blocks_new_work), "")
    return away, sum(policy.totals.completions for policy in shared_policies())


async def report_servers(look: Callable[[], Servers], say: Callable[[str, bool], None]) -> None:
    """Report until cancelled: whenever a wait begins or ends, and every few seconds during a wait or after answers.

    Args:
        look: returns the state, as :func:`servers_now`.
        say: gets the reason of the wait, and whether there was an answer since the last report.
    """
    said, answers, looks = "", 0, 0
    while True:
        await anyio.sleep(_LOOK_SECONDS)
        away, now = look()
        looks += 1
        if bool(away) != bool(said) or (looks >= _LOOKS and (away or now > answers)):
            say(away, now > answers)
            said, answers, looks = away, now, 0


class ServerReports:
    """The last reports of the workers of one run, by number."""

    def __init__(self) -> None:
        self._away: dict[int, tuple[str, float]] = {}
        self._answered: dict[int, float] = {}
        self._waits: dict[int, float] = {}
        """The begin of each worker's wait, until it is answered."""
        self._tried = math.inf
        """The time of the first cut since the last answer to a worker."""
        self._times_cut_off: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<ServerReports: {sorted(self._away)} wait for a server>"

    def is_away(self, worker: int) -> bool:
        """Whether requests of a worker wait for a server."""
        return worker in self._away

    def reason(self, worker: int) -> str:
        """Why requests of a worker wait; empty if none does."""
        return self._away.get(worker, ("", 0.0))[0]

    def take(self, worker: int, fields: Mapping[str, Any]) -> None:
        """Take a report; one of other fields than :func:`servers_record` writes says nothing."""
        reason, now = str(fields.get("away") or "")[:_LONGEST_REASON], anyio.current_time()
        if reason:
            self._away[worker] = reason, self._away.get(worker, ("", now))[1]
            self._waits.setdefault(worker, now)
            return
        self._away.pop(worker, None)
        if fields.get("answered") is True:
            self._answered[worker], self._tried = now, math.inf
            self._waits.pop(worker, None)
            self._times_cut_off.pop(worker, None)

    def may_try(self, worker: int) -> bool:
        """Whether another worker, of which it is not known that servers answer it, may get this one's rollouts."""
        return self._waits.get(worker, -math.inf) <= self._tried

    def over(self, idle: bool) -> dict[int, str]:
        """The workers that are cut off, each with its reason.

        Args:
            idle: whether a worker has no rollouts; it gets the rollouts of another one to find out.
        """
        now = anyio.current_time()
        last = max(self._answered.values(), default=-math.inf) - _OLDEST_ANSWER
        over = {number: away for number, away in self._away.items() if now - away[1] >= CUT_OFF_SECONDS}
        return {
            number: reason
            for number, (reason, since) in over.items()
            if last > since or (idle and self.may_try(number))
        }

    def forget(self, worker: int) -> None:
        """The worker with this number has ended."""
        for reports in (self._away, self._answered, self._waits):
            reports.pop(worker, None)

    def cut_off(self, worker: int) -> float:
        """Count a worker that was cut off; returns the seconds before another one should have its place.

        The pause grows while the workers in one place are cut off one after another, without an answer to any.
        """
        self.forget(worker)
        self._tried = min(self._tried, anyio.current_time())
        times = self._times_cut_off[worker] = self._times_cut_off.get(worker, 0) + 1
        return float(min(_LONGEST_PAUSE, _PAUSE_SECONDS * 2 ** min(times - 1, 10)))
