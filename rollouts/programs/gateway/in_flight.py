"""An amount that is under way at the same time: tokens at the policy, or bytes of bodies.

Invariant: the amount is at most the limit, unless a single request exceeds the limit by itself.
"""

from __future__ import annotations

import anyio
import attrs

__all__ = ["InFlight"]


class InFlight:
    """Tokens or bytes that are under way.

    Args:
        limit: the most at the same time; ``None``: unlimited.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._now = 0
        self._fewer: anyio.Event | None = None
        """Set when the amount falls; ``None`` while no request waits, as in most calls."""

    def more(self, amount: int) -> _Part:
        """A context that waits until this amount may be in flight, too; it is while the context lasts."""
        return _Part(self, amount)

    async def _add(self, amount: int) -> None:
        while self._limit is not None and self._now and self._now + amount > self._limit:
            self._fewer = self._fewer or anyio.Event()
            await self._fewer.wait()
        self._now += amount

    def _remove(self, amount: int) -> None:
        self._now -= amount
        if self._fewer is not None:
            self._fewer.set()
            self._fewer = None


@attrs.frozen(eq=False)
class _Part:
    flight: InFlight
    amount: int

    async def __aenter__(self) -> None:
        await self.flight._add(self.amount)

    async def __aexit__(self, *_: object) -> None:
        self.flight._remove(self.amount)
