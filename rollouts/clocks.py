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

import anyio
import attrs

__all__ = ["Clocks", "Standstill", "deadline", "standing_still", "standstills", "stopped_clocks"]

_CLOCKS: contextvars.ContextVar[tuple[anyio.CancelScope, ...]] = contextvars.ContextVar("rollouts_clocks", default=())


class deadline:  # noqa: N801 - used as `with deadline(...)`, in place of a generator: it is entered at every wait
    """``anyio.move_on_after`` whose clock :func:`stopped_clocks` can stop; for ever where ``seconds`` is ``None``."""

    __slots__ = ("_scope", "_token")

    def __init__(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._scope = _scope_class()(deadline=math.inf if seconds is None else loop.time() + seconds)

    def __enter__(self) -> anyio.CancelScope:
        scope = self._scope.__enter__()
        ever = scope.deadline == math.inf  # then there is no clock to stop
        self._token = None if ever else _CLOCKS.set((*_CLOCKS.get(), scope))
        return scope

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._token is not None:
            _CLOCKS.reset(self._token)
        return bool(self._scope.__exit__(kind, error, trace))


@functools.cache
def _scope_class() -> type[anyio.CancelScope]:
    """What ``anyio.CancelScope()`` gives in an event loop of asyncio, after a search that costs more than the scope."""
    return type(anyio.CancelScope())


class Clocks:
    """The deadlines around whoever makes it. Others may stop them too, in the same event loop."""

    __slots__ = ("_scopes", "_stopped")

    def __init__(self) -> None:
        self._scopes = _CLOCKS.get()
        self._stopped: list[tuple[anyio.CancelScope, float]] = []

    def stop(self) -> None:
        """Stop those that run."""
        now = asyncio.get_running_loop().time()
        self._stopped += [(scope, scope.deadline - now) for scope in self._scopes if now < scope.deadline < math.inf]
        for scope, _ in self._stopped:
            scope.deadline = math.inf

    def start(self) -> None:
        """Let those that were stopped here go on."""
        now = asyncio.get_running_loop().time()
        for scope, left in self._stopped:
            scope.deadline = now + left
        self._stopped.clear()


@contextlib.contextmanager
def stopped_clocks() -> Iterator[None]:
    """Stop the deadlines around us while inside: for a wait that somebody outside the run has asked for."""
    clocks = Clocks()
    clocks.stop()
    try:
        yield
    finally:
        clocks.start()


@attrs.frozen
class Standstill:
    """Something that many wait for, and that is nobody's failure."""

    what: str
    since: float
    """``time.monotonic()``."""
    waiting: Callable[[], int] = attrs.field(repr=False)
    """How many turns wait for it now."""

    def __str__(self) -> str:
        return f"{self.what} for {time.monotonic() - self.since:.1f} s, {self.waiting()} turns wait"


_STANDSTILLS: list[Standstill] = []


def standstills() -> list[Standstill]:
    """What there is in this process now, oldest first."""
    return list(_STANDSTILLS)


@contextlib.contextmanager
def standing_still(what: str, waiting: Callable[[], int]) -> Iterator[Standstill]:
    """List a standstill while inside."""
    standstill = Standstill(what, time.monotonic(), waiting)
    _STANDSTILLS.append(standstill)
    try:
        yield standstill
    finally:
        _STANDSTILLS.remove(standstill)
