"""A gate that spreads a burst of tasks over several turns of the event loop.

asyncio runs every task that is ready before it looks at its clock and sockets again. When thousands of replies become
readable at once, one turn of the loop takes thousands of times the milliseconds of one reply, and every deadline and
heartbeat waits behind it. A gate lets at most ``limit`` tasks pass in a turn, in order of arrival.

Invariant: a task waits only if ``limit`` others passed in this turn, and the next turn follows at once.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["FairTurns"]


class FairTurns:
    """One gate of one event loop at a time.

    Args:
        limit: most tasks that pass in a turn, of some milliseconds each; a timer waits for up to two turns.
    """

    __slots__ = ("_limit", "_loop", "_passed", "_waiting")

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<FairTurns: {len(self._waiting)} tasks wait, {self._passed} passed in this turn>"

    async def passed(self) -> None:
        """Return in a turn of the loop in which fewer than ``limit`` tasks have passed; a cancelled task leaves."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the turns of an earlier loop, which may have ended before its next one
            self._loop, self._passed = loop, 0
            self._waiting.clear()
        if self._passed < self._limit:
            if not self._passed:
                loop.call_soon(self._next_turn, loop)
            self._passed += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            loop.call_soon(self._next_turn, loop)
