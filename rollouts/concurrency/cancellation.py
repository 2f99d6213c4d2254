"""Cancellation of foreign coroutines that may refuse it: each is driven in the task that waits for it.

Invariant: the caller of a :class:`CancellationGuard` inside a cancelled scope continues within seconds, whatever the
coroutine does with its cancellation: swallow it for ever, or hide from it behind a shield. A coroutine that is given up
is never resumed, and is listed by :func:`left_behind`. One that ends within its grace period cleans up undisturbed.

The coroutine runs in the caller's own task, as if there were no guard. Tasks that it has started itself are cancelled
with the scopes that they live in, and waited for by nobody.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
from collections.abc import Awaitable, Generator
from typing import Any

import anyio
import anyio.lowlevel

from rollouts.concurrency.deadlines import deadline

__all__ = ["CancellationGuard", "left_behind"]

_SWALLOWED = 100
_SWALLOWING_SECONDS = 1.0
"""A cancelled scope asks again and again: a coroutine that swallowed so many of its cancellations, and for so long,
does nothing else."""
_FORCED = 3
"""How often one that hides behind a shield is told to end."""

_LEFT: list[CancellationGuard] = []


def left_behind() -> list[CancellationGuard]:
    """The coroutines that were let go in this process, oldest first."""
    return list(_LEFT)


class CancellationGuard:
    """Await it instead of the awaitable.

    Args:
        awaitable: foreign.
        around: the deadline around, not watched yet, whose scope is the innermost one. It is from the first wait on.
        what: who it is, for messages.
        place: where that is.
        grace: seconds from the deadline on that it may hide behind a shield, to clean up.
    """

    _waits_for: Any = None
    _overdue = False
    _forced = 0
    _swallowed = 0
    _since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def __init__(
        self, awaitable: Awaitable[Any], around: deadline, what: str, place: str = "here", *, grace: float = 10.0
    ) -> None:
        self.awaitable = awaitable
        self._what, self._place = what, place
        self._around = around
        self._grace = grace

    @property
    def what(self) -> str:
        """Who it is, and where."""
        return f"{self._place}: {self._what}"

    def __repr__(self) -> str:
        return f"<CancellationGuard {self.what}: {self._swallowed} cancellations swallowed>"

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self.awaitable.__await__()
        error: BaseException | None = None
        watched = False  # from its first wait on: many never wait, and a timer costs more than they do
        try:
            while True:
                try:
                    self._waits_for = next(inner) if error is None else inner.throw(error)
                except StopIteration as end:
                    if not self._overdue:
                        return end.value
                    break
                except BaseException as raised:
                    if not self._overdue or not isinstance(raised, asyncio.CancelledError):
                        raise
                    break
                if error is not None and self._is_hopeless():
                    self._let_go()
                    self._leave_its_scopes()
                    if not self._overdue:
                        raise error
                    break
                error = None
                if not watched:
                    watched = True
                    self._around.arm()
                    self._look()
                try:
                    yield self._waits_for
                except BaseException as thrown:  # noqa: BLE001 - thrown on into the coroutine
                    error = thrown
                    self._count(thrown)
                if self._overdue:
                    self._forced += 1
                    error = error or asyncio.CancelledError()
        finally:
            error = None  # its traceback holds this frame: nothing but a collector would free the two
            if self._timer is not None:
                self._timer.cancel()
        yield from anyio.lowlevel.checkpoint().__await__()  # our scope is cancelled: raises what was hidden from
        raise asyncio.CancelledError

    def _look(self) -> None:
        """See whether the grace is over; then wake the coroutine wherever it waits."""
        loop = asyncio.get_running_loop()
        left = self._around.ends + self._grace - loop.time()
        if left == math.inf and self._timer is None:
            return
        if left <= 0 and self._around.expired:
            self._overdue = True
            if isinstance(self._waits_for, asyncio.Future):
                self._waits_for.cancel()
        again = min(left, 3600.0) if left > 0 else 1.0  # a stopped clock moves the deadline
        self._timer = loop.call_later(again, self._look)

    def _count(self, thrown: BaseException) -> None:
        if isinstance(thrown, asyncio.CancelledError):
            self._since = self._since or time.monotonic()
            self._swallowed += 1

    def _is_hopeless(self) -> bool:
        swallows = self._swallowed >= _SWALLOWED and time.monotonic() - self._since >= _SWALLOWING_SECONDS
        return swallows or self._forced >= _FORCED

    def _let_go(self) -> None:
        """Keep the coroutine for ever: to close or to free it, even at the end of the interpreter, would resume it."""
        _LEFT.append(self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.awaitable))

    def _leave_its_scopes(self) -> None:
        """Be where we were before it entered scopes that it will never leave."""
        while True:
            probe = anyio.CancelScope()
            with probe:
                current = getattr(probe, "_parent_scope", None)  # anyio tells no other way which scope is the current
            if current is None or current is self._around.scope:
                return
            current.cancel()
            current.__exit__(None, None, None)
