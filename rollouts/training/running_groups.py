"""The groups that run: when one starts, how it is cancelled, and how the end of the next one is awaited.

Invariant: a group is listed from its start until its prompt is accounted for. This module does not know accounts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from rollouts.concurrency.deadlines import scope_class

__all__ = ["GROUPS_A_TURN", "RunningGroups"]

GROUPS_A_TURN = 8
"""Groups that start or are cancelled in one turn of the event loop: ten thousand at once would block it for seconds."""


class RunningGroups:
    """The cancel scopes of the groups that run, by group index."""

    def __init__(self) -> None:
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._ended = asyncio.Event()
        self._is_starting = False
        self._start_lock = anyio.Lock(fast_acquire=True)

    async def turn_to_start(self) -> None:
        """Wait while another group starts: all at once would block the event loop."""
        async with self._start_lock:
            await anyio.lowlevel.checkpoint()

    def begin(self, index: int) -> anyio.CancelScope:
        """List a group that starts; returns the scope in which it runs."""
        scope = self._scopes[index] = scope_class()()
        return scope

    def end(self, index: int) -> None:
        """Note that a group is accounted for."""
        del self._scopes[index]
        self.wake()

    def wake(self) -> None:
        """End the wait for the next end, e.g. for an error."""
        self._ended.set()

    async def next_end(self) -> None:
        """Wait until a further group has ended, or :meth:`wake` is called."""
        if self._ended.is_set():
            self._ended = asyncio.Event()
        await self._ended.wait()

    async def cancel(self, indices: Set[int]) -> None:
        """Cancel groups, and wait until they have ended."""
        for index in self._scopes.keys() & indices:
            self._scopes[index].cancel()
        while self._scopes.keys() & indices:
            await self.next_end()

    def call_in_next_turn(self, tasks: TaskGroup, start: Callable[[], None]) -> None:
        """Call a function that starts further groups, once in the next turn of the event loop."""
        if not self._is_starting:
            self._is_starting = True
            tasks.start_soon(self._call, start)

    async def _call(self, start: Callable[[], None]) -> None:
        self._is_starting = False
        start()

    async def end_all(self, tasks: TaskGroup) -> None:
        """Cancel the groups, the newest first so that no slot that one gives back starts another; exit their tasks."""
        try:
            for number, scope in enumerate(reversed([*self._scopes.values()]), 1):
                scope.cancel()
                if number % GROUPS_A_TURN == 0:
                    await anyio.lowlevel.checkpoint()
        finally:
            self._is_starting = False
            tasks.cancel_scope.cancel()
            await tasks.__aexit__(None, None, None)
