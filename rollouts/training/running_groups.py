"""The groups that run: when one starts, how it is cancelled, and how the end of the next one is awaited.

Invariant: a group is listed from its start until its prompt is accounted for. This module does not know accounts.
"""

from __future__ import annotations

from collections.abc import Set

import anyio

from rollouts.concurrency.deadlines import scope_class
from rollouts.concurrency.fair_turns import FairTurns

__all__ = ["RunningGroups"]


class RunningGroups:
    """The cancel scopes of the groups that run, by group index."""

    def __init__(self) -> None:
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._ended = anyio.Event()
        self.starts = FairTurns(1)
        """One group starts in a turn of the event loop: all at once would block it."""

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
            self._ended = anyio.Event()
        await self._ended.wait()

    async def cancel(self, indices: Set[int]) -> None:
        """Cancel groups, and wait until they have ended."""
        for index in self._scopes.keys() & indices:
            self._scopes[index].cancel()
        while self._scopes.keys() & indices:
            await self.next_end()
