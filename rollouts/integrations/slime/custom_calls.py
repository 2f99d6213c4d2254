"""Running calls of custom generate functions, which send their own requests to the engines.

Invariant: at most as many calls run at once as the policy may have requests in flight, each from the start of its
function to the end. After :meth:`CustomCalls.stop` no call runs; if one was cut off, no request is left on any server.

It knows no samples and no batches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from rollouts.errors import EndpointUnavailable
from rollouts.inference.resumable import ResumablePolicy

__all__ = ["CustomCalls", "Stopped"]

_GRACE_SECONDS = 60.0
_ROUND_SECONDS = 1.0
"""Delay before the next abort: a function may have sent another request."""
_IDLE_SECONDS = 60.0

T = TypeVar("T")


class Stopped(Exception):
    """The call was cancelled because its batch is full."""


class CustomCalls:
    """The calls of one trainer.

    Args:
        abort_all: aborts the requests of everyone on all servers until none is left, within the given seconds.
        grace_seconds: time for functions to return after their requests were aborted: a tool of theirs may still run.
    """

    def __init__(self, abort_all: Callable[[float], Awaitable[None]], *, grace_seconds: float = _GRACE_SECONDS) -> None:
        self._abort_all = abort_all
        self._grace_seconds = grace_seconds
        self._running: set[anyio.CancelScope] = set()
        self._idle = anyio.Event()
        self._cut_off = False

    def __repr__(self) -> str:
        return f"<CustomCalls: {len(self._running)} running>"

    async def run(self, policy: ResumablePolicy, call: Callable[[], Awaitable[T]]) -> T:
        """Await a call of a function when the policy is open and has a place for it.

        Raises:
            Stopped: :meth:`stop` cancelled the call.
        """
        async with policy.slot():
            with anyio.CancelScope() as scope:
                self._running.add(scope)
                try:
                    return await call()
                except anyio.get_cancelled_exc_class():
                    self._cut_off = True
                    raise
                finally:
                    self._running.discard(scope)
                    if not self._running:
                        self._idle.set()
        raise Stopped

    async def stop(self, *, lets_return: bool) -> None:
        """Stop all calls, and return when the servers are idle if a call was cut off. The policy must be paused.

        Args:
            lets_return: whether functions return what an aborted request has generated, as with ``--partial-rollout``.
                Others, and those that do not return in time, are cancelled.

        Raises:
            EndpointUnavailable: a server does not respond, a request does not end, or a function does not stop.
        """
        if lets_return:
            with anyio.move_on_after(self._grace_seconds):
                while self._running:
                    await self._abort_all(_IDLE_SECONDS)
                    await self._wait(_ROUND_SECONDS)
        for scope in self._running:
            scope.cancel()
        await self._wait(_IDLE_SECONDS)
        if self._cut_off:
            await self._abort_all(_IDLE_SECONDS)
            self._cut_off = False
        if self._running:
            raise EndpointUnavailable(f"{len(self._running)} custom generate functions do not end when cancelled")

    async def _wait(self, seconds: float) -> None:
        """Return when no call runs, or after ``seconds``."""
        if self._running:
            self._idle = anyio.Event()
            with anyio.move_on_after(seconds):
                await self._idle.wait()
