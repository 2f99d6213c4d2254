"""Running calls of custom generate functions, which send their own requests to the engines.

Invariant: at most as many calls run at once as the policy may have requests in flight, each from the start of its
function to the end. After :meth:`CustomCalls.stop` no call runs; if one was cut off, no request is left on any server.

A function with the attribute ``abort_mode = "request"`` ends its own requests when it is cancelled: the requests of
others are aborted only if the servers do not become idle.

It knows no samples and no batches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from rollouts.concurrency.boundary import function_name
from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.inference.resumable import ResumablePolicy

__all__ = ["CustomCalls", "Stopped", "ends_its_requests"]

_GRACE_SECONDS = 60.0
_ROUND_SECONDS = 1.0
"""Delay before the next abort: a function may have sent another request."""
_IDLE_SECONDS = 60.0
_END_SECONDS = 5.0
"""Time for the end of requests whose connection a function has closed."""

T = TypeVar("T")


class Stopped(Exception):
    """The call was cancelled because its batch is full."""


def ends_its_requests(function: Callable[..., object]) -> bool:
    """Whether a generate function ends its own requests when it is cancelled.

    Raises:
        ConfigError: an unknown ``abort_mode``.
    """
    mode = getattr(function, "abort_mode", None)
    if mode not in (None, "request"):
        raise ConfigError.of(f"{function_name(function)}.abort_mode", mode, '"request", or no such attribute')
    return mode == "request"


class CustomCalls:
    """The calls of one trainer.

    Args:
        abort_all: :meth:`~rollouts.inference.policy.ServerPolicy.abort_all`.
        grace_seconds: time for functions to return after their requests were aborted: their tools may still run.
    """

    def __init__(self, abort_all: Callable[..., Awaitable[None]], *, grace_seconds: float = _GRACE_SECONDS) -> None:
        self._abort_all = abort_all
        self._grace_seconds = grace_seconds
        self._running: dict[anyio.CancelScope, bool] = {}
        """The scope of each call, and whether its function ends its own requests."""
        self._idle = anyio.Event()
        self._cut_off: set[bool] = set()
        """Whether functions of either kind were cancelled since the last stop."""

    def __repr__(self) -> str:
        return f"<CustomCalls: {len(self._running)} running>"

    async def run(self, policy: ResumablePolicy, call: Callable[[], Awaitable[T]], *, ends_requests: bool = False) -> T:
        """Await a call of a function when the policy is open and has a place for it.

        Raises:
            Stopped: :meth:`stop` cancelled the call.
        """
        async with policy.slot():
            with anyio.CancelScope() as scope:
                self._running[scope] = ends_requests
                try:
                    return await call()
                except anyio.get_cancelled_exc_class():
                    self._cut_off.add(ends_requests)
                    raise
                finally:
                    del self._running[scope]
                    if not self._running:
                        self._idle.set()
        raise Stopped

    async def stop(self, *, lets_return: bool) -> None:
        """Stop all calls, and return when the servers are idle if a call was cut off. The policy must be paused.

        Args:
            lets_return: whether functions may return the part of a reply that an aborted request has generated, as with
                ``--partial-rollout``. A function that ends its own requests or does not return in time is cancelled.

        Raises:
            EndpointUnavailable: a server does not respond, a request does not end, or a function does not stop.
        """
        for scope, ends_requests in list(self._running.items()):
            if ends_requests:
                scope.cancel()
        if lets_return:
            with anyio.move_on_after(self._grace_seconds):
                while not all(self._running.values()):
                    await self._abort_all(_IDLE_SECONDS)
                    await self._wait(_ROUND_SECONDS)
        for scope in self._running:
            scope.cancel()
        await self._wait(_IDLE_SECONDS)
        if self._cut_off:
            grace = {} if False in self._cut_off else {"grace": _END_SECONDS}
            await self._abort_all(_IDLE_SECONDS, **grace)
            self._cut_off.clear()
        if self._running:
            raise EndpointUnavailable(f"{len(self._running)} custom generate functions do not end when cancelled")

    async def _wait(self, seconds: float) -> None:
        """Return when no call runs, or after ``seconds``."""
        if self._running:
            self._idle = anyio.Event()
            with anyio.move_on_after(seconds):
                await self._idle.wait()
