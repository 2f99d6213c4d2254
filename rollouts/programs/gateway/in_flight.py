"""An amount that is under way at the same time: tokens at the policy, or bytes of bodies.

Invariant: the amount is at most the limit, unless a single request exceeds the limit by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio

__all__ = ["InFlight"]


class InFlight:
    """Tokens or bytes that are under way.

    Args:
        limit: the most at the same time; ``None``: unlimited.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._now = 0
        self._fewer = anyio.Event()

    @contextlib.asynccontextmanager
    async def more(self, amount: int) -> AsyncIterator[None]:
        """Wait until this amount may be in flight, too; it is while the context lasts."""
        while self._limit is not None and self._now and self._now + amount > self._limit:
            await self._fewer.wait()
        self._now += amount
        try:
            yield
        finally:
            self._now -= amount
            self._fewer.set()
            self._fewer = anyio.Event()
