"""Deadlines whose clock can be stopped, by whoever waits and by others; and what everybody stands still for.

Invariant: while somebody's clocks are stopped none of the deadlines around him passes, and afterwards each has as much
left as before; one that has passed stays passed. This module knows nothing of what is waited for.
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
from typing import Self

import anyio
import attrs

__all__ = ["Clocks", "Pause", "deadline", "listed_pause", "paused_deadlines", "pauses"]

_CLOCKS: contextvars.ContextVar[tuple[deadline, ...]] = contextvars.ContextVar("rollouts_clocks", default=())


class deadline:  # noqa: N801 - used as `with deadline(...)`, in place of a generator: it is entered at every wait
    """``anyio.move_on_after`` whose clock :func:`paused_deadlines` can stop; for ever where ``seconds`` is ``None``.

    Args:
        seconds: from when it is made.
        watched: whether it passes by itself; else from :meth:`watch` on, for code of which most never waits: a timer
            costs more than all the rest. One that is watched and has no ``seconds`` opens no scope.
    """

    __slots__ = ("_armed", "_token", "ends", "scope")

    def __init__(self, seconds: float | None, *, armed: bool = True) -> None:
        self._token: contextvars.Token[tuple[deadline, ...]] | None = None
        self._armed = armed
        self.scope: anyio.CancelScope | None = None
        if seconds is None:
            self.ends = math.inf
            if armed:  # nothing will ever end what runs inside
                return
        else:
            self.ends = asyncio.get_running_loop().time() + seconds
        self.scope = _scope_class()(deadline=self.ends if armed else math.inf)

    def __enter__(self) -> Self:
        if self.scope is not None:
            self.scope.__enter__()
        if self.ends != math.inf:  # else there is no clock to stop
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
        """Whether it has passed."""
        return self.scope is not None and self.scope.cancel_called

    @property
    def caught(self) -> bool:
        """Whether it has ended what ran inside."""
        return self.scope is not None and self.scope.cancelled_caught

    def arm(self) -> None:
        """Let it pass by itself from here on."""
        if not self._armed:
            self._armed = True
            self.move(self.ends)

    def move(self, ends: float) -> None:
        """Let it pass then."""
        self.ends = ends
        if self._armed and self.scope is not None:
            self.scope.deadline = ends


@functools.cache
def _scope_class() -> type[anyio.CancelScope]:
    """What ``anyio.CancelScope()`` gives in an event loop of asyncio, after a search that costs more than the scope."""
    return type(anyio.CancelScope())


class Clocks:
    """The deadlines around whoever makes it. Others may stop them too, in the same event loop."""

    __slots__ = ("_deadlines", "_stopped")

    def __init__(self) -> None:
        self._deadlines = _CLOCKS.get()
        self._stopped: list[tuple[deadline, float]] = []

    def pause(self) -> None:
        """Stop those that run."""
        now = asyncio.get_running_loop().time()
        self._stopped += [(one, one.ends - now) for one in self._deadlines if now < one.ends < math.inf]
        for one, _ in self._stopped:
            one.move(math.inf)

    def resume(self) -> None:
        """Let those that were stopped here go on."""
        now = asyncio.get_running_loop().time()
        for one, left in self._stopped:
            one.move(now + left)
        self._stopped.clear()


@contextlib.contextmanager
def paused_deadlines() -> Iterator[None]:
    """Stop the deadlines around us while inside: for a wait that somebody outside the run has asked for."""
    clocks = Clocks()
    clocks.pause()
    try:
        yield
    finally:
        clocks.resume()


@attrs.frozen
class Pause:
    """Something that many wait for, and that is nobody's failure."""

    what: str
    since: float
    """``time.monotonic()``."""
    waiting: Callable[[], int] = attrs.field(repr=False)
    """How many turns wait for it now."""

    def __str__(self) -> str:
        return f"{self.what} for {time.monotonic() - self.since:.1f} s, {self.waiting()} turns wait"


_PAUSES: list[Pause] = []


def pauses() -> list[Pause]:
    """What there is in this process now, oldest first."""
    return list(_PAUSES)


@contextlib.contextmanager
def listed_pause(what: str, waiting: Callable[[], int]) -> Iterator[Pause]:
    """List a standstill while inside."""
    standstill = Pause(what, time.monotonic(), waiting)
    _PAUSES.append(standstill)
    try:
        yield standstill
    finally:
        _PAUSES.remove(standstill)
