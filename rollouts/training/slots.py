"""Admission of rollouts: at most ``count`` of them run at once, and the oldest group comes first.

Invariant: a rollout waits only while every slot is taken, and a free slot goes to the waiting rollout with the lowest
group index, then the lowest number in its group. A slot is never lost: a rollout that is cancelled while it waits
leaves the queue, and hands on a slot that it was given meanwhile.

A group that started has not asked for its slots yet. Its rollouts are reserved, so that one free slot does not start
many groups. This module does not know prompts, accounts or what a rollout does.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable

import attrs

from rollouts.concurrency.boundary import boundary
from rollouts.concurrency.deadlines import deadline
from rollouts.concurrency.times import Span, now
from rollouts.errors import RolloutsError

__all__ = ["Slots"]

_Key = tuple[int, int]
"""Group index, and number in the group: the lowest key waits longest for its group."""


@attrs.define
class _Mean:
    """The mean of a number over time."""

    value: int = 0
    _sum: float = 0.0
    _since: float = 0.0

    def add(self, change: int, at: float) -> None:
        self._sum += self.value * (at - self._since)
        self._since = at
        self.value += change

    def take(self, seconds: float, at: float) -> float:
        """Return the mean over the last ``seconds``, all since the previous call."""
        self.add(0, at)
        total, self._sum = self._sum, 0.0
        return total / seconds if seconds > 0 else float(self.value)


class Slots:
    """The slots of one run.

    Args:
        count: maximum number of rollouts that run at once; ``None`` for no limit.
        on_free: called when a slot is free that :meth:`has_room` has refused to a new group; must not raise.
    """

    def __init__(self, count: int | None, on_free: Callable[[], None] = lambda: None) -> None:
        self.count = count
        self._most = math.inf if count is None else count
        self._on_free = on_free
        self._refused = False
        self._reserved: dict[int, int] = {}
        self._total_reserved = 0
        self._waiting: dict[_Key, asyncio.Future[None]] = {}
        self._queue: list[_Key] = []  # a heap; keys that are not in ``_waiting`` were cancelled
        self._running, self._groups = _Mean(), _Mean()
        self._began = 0.0

    def __repr__(self) -> str:
        most = "any number of" if self.count is None else self.count
        return f"<Slots: {self.running} of {most} taken, {len(self._waiting)} rollouts wait>"

    @property
    def running(self) -> int:
        """Rollouts that have a slot."""
        return self._running.value

    @property
    def waiting(self) -> int:
        """Rollouts that wait for a slot."""
        return len(self._waiting)

    # -- groups --

    def has_room(self) -> bool:
        """Whether a slot is free that no rollout of a started group will take; if not, ``on_free`` is called later."""
        self._refused = self._is_full()
        return not self._refused

    def _is_full(self) -> bool:
        return self.running + len(self._waiting) + self._total_reserved >= self._most

    def open(self, group: int, rollouts: int) -> None:
        """Note that a group starts, and reserve slots for its rollouts; :meth:`close` ends it."""
        self._groups.add(1, _now())
        self.reserve(group, rollouts)

    def reserve(self, group: int, rollouts: int) -> None:
        """Reserve slots for rollouts of an open group that will ask for them; replaces an earlier reservation."""
        self._total_reserved += rollouts - self._reserved.pop(group, 0)
        if rollouts:
            self._reserved[group] = rollouts

    def close(self, group: int) -> None:
        """End a group."""
        self.reserve(group, 0)
        self._groups.add(-1, _now())
        self._call_if_free()

    # -- rollouts --

    async def acquire(self, group: int, number: int, limit: deadline) -> Span | None:
        """Take a slot; if none is free, wait for it, while the group's deadline ``limit`` is paused.

        Returns:
            The wait, if there was one.
        """
        if group in self._reserved:
            self.reserve(group, self._reserved[group] - 1)
        if self.running < self._most:
            self._running.add(1, _now())
            return None
        began, key = now(), (group, number)
        granted = self._waiting[key] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, key)
        paused = limit.pause()
        try:
            with boundary(RolloutsError, f"a free slot of {self.count}", kind="a_pause", shown="a slot"):
                await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self.release()
            else:
                self._waiting.pop(key, None)
            raise
        finally:
            if paused:
                limit.resume()
        return Span("queued", "a slot", began, now() - began)

    def release(self) -> None:
        """Give a slot back: to the first rollout that waits, or to ``on_free``."""
        while self._queue:
            granted = self._waiting.pop(heapq.heappop(self._queue), None)
            if granted is not None and not granted.done():  # else its task is being cancelled
                granted.set_result(None)  # the slot stays taken
                return
        self._running.add(-1, _now())
        self._call_if_free()

    def _call_if_free(self) -> None:
        if self._refused and not self._is_full():
            self._refused = False
            self._on_free()

    # -- metrics --

    def take_metrics(self, most: float) -> dict[str, float]:
        """Return the mean rollouts and groups at work since the last call; ``most`` is the number that may run."""
        ended = _now()
        seconds, self._began = ended - self._began, ended
        running, groups = self._running.take(seconds, ended), self._groups.take(seconds, ended)
        return {"slots/running": running, "slots/busy": running / most, "groups/open": groups}


def _now() -> float:
    return asyncio.get_running_loop().time()
