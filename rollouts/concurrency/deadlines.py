"""Deadlines that any task of the event loop can pause, and the list of global pauses.

Invariant: while the deadlines around a task are paused, none of them expires; afterwards each has as much time left as
before. A deadline that has expired stays expired. This module does not know the waits themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import anyio
import attrs

__all__ = [
    "Clocks",
    "Pause",
    "caller_here",
    "deadline",
    "exit_scopes_inside",
    "is_cancelled_from",
    "listed_pause",
    "paused_deadlines",
    "pauses",
    "scope_class",
]

_CLOCKS: contextvars.ContextVar[tuple[deadline, ...]] = contextvars.ContextVar("rollouts_clocks", default=())


class deadline:  # noqa: N801 - used as `with deadline(...)`; no generator, as every wait enters one
    """An ``anyio.move_on_after`` that :class:`Clocks` can pause.

    Args:
        seconds: time limit, counted from the construction; ``None``: no limit.
        armed: whether the timer starts at once; else :meth:`arm` starts it, for code that mostly never waits: the timer
            is the greater part of the cost. An armed deadline without ``seconds`` and ``shield`` opens no scope.
        shield: whether cancellations from outside wait until the code inside has ended.
    """

    __slots__ = ("_armed", "_left", "_loop", "_token", "ends", "pauses", "scope")

    def __init__(self, seconds: float | None, *, armed: bool = True, shield: bool = False) -> None:
        self._token: contextvars.Token[tuple[deadline, ...]] | None = None
        self._armed = armed
        self.pauses, self._left, self.ends = 0, 0.0, math.inf  # pauses: how many have not ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self.scope: anyio.CancelScope | None = None
        if seconds is not None:
            self._loop = asyncio.get_running_loop()
            self.ends = self._loop.time() + seconds
        elif armed and not shield:  # nothing is to cancel the code inside
            return
        self.scope = scope_class()(deadline=self.ends if armed else math.inf, shield=shield)

    def __enter__(self) -> Self:
        if self.scope is not None:
            self.scope.__enter__()
        if self.ends != math.inf:  # else there is nothing to pause
            self._token = _CLOCKS.set((*_CLOCKS.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._token is not None:
            _CLOCKS.reset(self._token)
        return self.scope is not None and bool(self.scope.__exit__(kind, error, trace))

    @property
    def expired(self) -> bool:
        """Whether the deadline has expired."""
        return self.scope is not None and self.scope.cancel_called

    @property
    def caught(self) -> bool:
        """Whether the deadline cancelled the code inside."""
        return self.scope is not None and self.scope.cancelled_caught

    def arm(self, then: Callable[[], None]) -> None:
        """Start the timer, and call ``then``, in an empty context: asyncio keeps a cancelled timer, and its context."""
        contextvars.Context().run(self._start, then)

    def _start(self, then: Callable[[], None]) -> None:
        self._armed = True
        if self.scope is not None:
            self.scope.deadline = self.ends
        then()

    def pause(self) -> bool:
        """Pause once more; false for a deadline that has expired or has no limit."""
        if not self.pauses:
            left = self.ends - asyncio.get_running_loop().time()
            if not 0 < left < math.inf:
                return False
            self._left = left
            self._move(math.inf)
        self.pauses += 1
        return True

    def resume(self) -> None:
        """End one pause; after the last one, as much time is left as before the first."""
        self.pauses -= 1
        if not self.pauses:
            self._move(asyncio.get_running_loop().time() + self._left)

    def _move(self, ends: float) -> None:
        self.ends = ends
        if self._armed and self.scope is not None:
            self.scope.deadline = ends


@functools.cache
def scope_class() -> type[anyio.CancelScope]:
    """The class that ``anyio.CancelScope()`` returns on asyncio; its lookup costs more than the scope."""
    return type(anyio.CancelScope())


def exit_scopes_inside(scope: anyio.CancelScope) -> bool:
    """Cancel and exit the scopes that the current task entered inside ``scope`` and left open.

    Returns:
        Whether there was one.
    """
    inside: list[anyio.CancelScope] = []
    probe = scope_class()()
    with probe:
        current = _parent(probe)
    while current is not None and current is not scope:
        inside.append(current)
        current = _parent(current)
    if current is None:
        return False  # the task has left ``scope``
    for left in inside:
        left.cancel()
        left.__exit__(None, None, None)
    return bool(inside)


def is_cancelled_from(scope: anyio.CancelScope | None) -> bool:
    """Whether ``scope`` or one around it is cancelled, so that its cancellation is repeated inside ``scope``."""
    while scope is not None:
        if scope.cancel_called:
            return True
        if scope.shield:
            return False
        scope = _parent(scope)
    return False


def _parent(scope: anyio.CancelScope) -> anyio.CancelScope | None:
    """The scope around a scope. anyio has no public way to it; without the attribute this raises."""
    parent: anyio.CancelScope | None = scope._parent_scope  # type: ignore[attr-defined]
    return parent


class Clocks:
    """The deadlines around the task that creates it. Other tasks of the same event loop may pause them too."""

    __slots__ = ("_deadlines", "_paused")

    def __init__(self) -> None:
        self._deadlines = _CLOCKS.get()
        self._paused: list[deadline] = []

    def pause(self) -> None:
        """Pause the deadlines that have not expired, each once."""
        self._paused += [limit for limit in self._deadlines if limit not in self._paused and limit.pause()]

    def resume(self) -> None:
        """Resume the paused deadlines; a deadline that other tasks have paused too resumes after the last of them."""
        for limit in self._paused:
            limit.resume()
        self._paused = []


@contextlib.contextmanager
def paused_deadlines() -> Iterator[None]:
    """Pause the enclosing deadlines while inside, for a wait that is requested from outside the run."""
    clocks = Clocks()
    clocks.pause()
    try:
        yield
    finally:
        clocks.resume()


def caller_here() -> Callable[..., Any]:
    """Return a function that calls another one as from here, e.g. so that a task starts among these deadlines."""
    return contextvars.copy_context().run


@attrs.frozen
class Pause:
    """A global pause: many turns wait for it, and none of them failed."""

    what: str
    since: float
    """``time.monotonic()`` at its start."""
    waiting: Callable[[], int] = attrs.field(repr=False)
    """Returns the number of turns that wait for it now."""
    blocks_new_work: bool = False
    """Whether no new group starts meanwhile."""

    def __str__(self) -> str:
        return f"{self.what} for {time.monotonic() - self.since:.1f} s, {self.waiting()} turns wait"


_PAUSES: list[Pause] = []


def pauses() -> list[Pause]:
    """The global pauses of this process, oldest first."""
    return list(_PAUSES)


@contextlib.contextmanager
def listed_pause(
    what: str, waiting: Callable[[], int], *, since: float | None = None, blocks_new_work: bool = False
) -> Iterator[Pause]:
    """List a global pause while inside; arguments are the fields of :class:`Pause`."""
    pause = Pause(what, time.monotonic() if since is None else since, waiting, blocks_new_work)
    _PAUSES.append(pause)
    try:
        yield pause
    finally:
        _PAUSES.remove(pause)
