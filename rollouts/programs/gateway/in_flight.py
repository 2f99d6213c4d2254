"""An amount that is under way at the same time: tokens at the policy, or bytes of bodies.

Invariant: it is at most the limit, except that of a single one that is more by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio

__all__ = ["InFlight"]


class InFlight:
    """Tokens or bytes that are under way.

    Args:
        most: the limit; ``None``: unlimited.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._now = 0
        self._fewer = anyio.Event()

    @contextlib.asynccontextmanager
    async def more(self, amount: int) -> AsyncIterator[None]:
        """Wait until so many more may be in flight; they are while the context lasts."""
        while self._most is not None and self._now and self._now + amount > self._most:
            await self._fewer.wait()
        self._now += amount
        try:
            yield
        finally:
            self._now -= amount
            self._fewer.set()
            self._fewer = anyio.Event()
