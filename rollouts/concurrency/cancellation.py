"""Cancellation of user coroutines that may refuse it: each is driven in the task that waits for it.

Invariant: inside a cancelled scope, the task that awaits a :class:`CancellationGuard` continues within seconds, even if
the coroutine suppresses every cancellation or awaits behind a shield. An abandoned coroutine is never resumed, and
:func:`left_behind` lists it. A coroutine that ends within its grace period cleans up undisturbed.

The coroutine runs in the caller's task, as without a guard. Tasks that it started are cancelled with their scopes;
the guard does not wait for them.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
import weakref
from collections.abc import Awaitable, Generator
from typing import Any

import anyio
import anyio.lowlevel

from rollouts.concurrency.deadlines import deadline, exit_scopes_inside, is_cancelled_from

__all__ = ["CancellationGuard", "left_behind"]

_MAX_SUPPRESSED = 100
_SUPPRESSING_SECONDS = 1.0
"""A cancelled scope repeats its cancellation: a coroutine that suppressed this many, for this long, is abandoned."""
_MAX_FORCED = 3
"""Number of cancellations sent to a coroutine behind a shield before it is abandoned."""
_POLL_SECONDS = 1.0
"""Delay of the next check of a deadline that is paused or has expired."""

_ABANDONED: list[CancellationGuard] = []
_CHECKS: weakref.WeakKeyDictionary[Any, dict[float, dict[CancellationGuard, None]]] = weakref.WeakKeyDictionary()
"""By event loop and second of its clock: the guards to check, with one timer. asyncio sorts 100,000 timers in 0.2 s."""


def left_behind() -> list[CancellationGuard]:
    """The abandoned coroutines of this process, oldest first."""
    return list(_ABANDONED)


class CancellationGuard:
    """An awaitable that runs another one and can abandon it.

    Args:
        awaitable: the awaitable of user code.
        around: the enclosing deadline, not armed yet, whose scope is the innermost one. The first wait arms it.
        what: name of the code, for messages.
        place: where it runs, for messages.
        grace: seconds after the deadline that the coroutine may await behind a shield, to clean up.
    """

    _waits_for: Any = None
    _overdue = False
    _forced = 0
    _suppressed = 0
    _since = 0.0
    _checks: dict[CancellationGuard, None] | None = None

    def __init__(
        self, awaitable: Awaitable[Any], around: deadline, what: str, place: str = "here", *, grace: float = 10.0
    ) -> None:
        self.awaitable = awaitable
        self.what = f"{place}: {what}"
        self._around = around
        self._grace = grace

    def __repr__(self) -> str:
        return f"<CancellationGuard {self.what}: {self._suppressed} cancellations suppressed>"

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self.awaitable.__await__()
        error: BaseException | None = None
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
                    _ABANDONED.append(self)  # alive for ever: closing or freeing it, even at exit, would resume it
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.awaitable))
                    assert self._around.scope is not None, "a guard needs a scope around it"
                    exit_scopes_inside(self._around.scope)  # so that the task's scopes nest again
                    if not self._overdue:
                        raise error
                    break
                error = None
                if self._checks is None:  # the first wait: many coroutines never wait, and a timer costs more
                    self._around.arm(self._check_grace)
                try:
                    yield self._waits_for
                except BaseException as thrown:  # noqa: BLE001 - thrown into the coroutine above
                    error = thrown
                    self._count(thrown)
                if self._overdue:
                    self._forced += 1
                    error = error or asyncio.CancelledError()
        finally:
            error = None  # its traceback refers to this frame: a cycle that only the collector would free
            if self._checks is not None:
                self._checks.pop(self, None)
        yield from anyio.lowlevel.checkpoint().__await__()  # raises the cancellation of our scope
        raise asyncio.CancelledError

    def _check_grace(self) -> None:
        """Cancel the future that the coroutine waits for if the grace period is over; else check again later."""
        loop = asyncio.get_running_loop()
        now, over = loop.time(), self._around.ends + self._grace
        if over == math.inf and not self._around.pauses:
            self._checks = {}
            return
        if over <= now and self._around.expired:
            self._overdue = True
            if isinstance(self._waits_for, asyncio.Future):
                self._waits_for.cancel()
        later = now + (3600.0 if now < over < math.inf else _POLL_SECONDS)  # ended guards leave a timer: at most 3,600
        second = (over if now < over < later else later) // 1 + 1
        seconds = _CHECKS.setdefault(loop, {})
        if second not in seconds:
            loop.call_at(second, _check_all, seconds, second)
        self._checks = seconds.setdefault(second, {})
        self._checks[self] = None

    def _count(self, thrown: BaseException) -> None:
        # Timeouts of the coroutine itself do not count: it may wait in any number of them.
        if isinstance(thrown, asyncio.CancelledError) and is_cancelled_from(self._around.scope):
            self._since = self._since or time.monotonic()
            self._suppressed += 1

    def _is_hopeless(self) -> bool:
        suppresses = self._suppressed >= _MAX_SUPPRESSED and time.monotonic() - self._since >= _SUPPRESSING_SECONDS
        return suppresses or self._forced >= _MAX_FORCED


def _check_all(seconds: dict[float, dict[CancellationGuard, None]], second: float) -> None:
    for guard in seconds.pop(second):
        guard._check_grace()
