"""The tokens that one session has at the policy at the same time.

Invariant: they are at most the limit, except those of a single call that has more by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio

__all__ = ["TokensInFlight"]


class TokensInFlight:
    """Tokens of prompts and budgets at the policy.

    Args:
        most: the limit; ``None``: unlimited.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._now = 0
        self._fewer = anyio.Event()

    @contextlib.asynccontextmanager
    async def more(self, tokens: int) -> AsyncIterator[None]:
        """Wait until so many more may be in flight; they are while the context lasts."""
        while self._most is not None and self._now and self._now + tokens > self._most:
            await self._fewer.wait()
        self._now += tokens
        try:
            yield
        finally:
            self._now -= tokens
            self._fewer.set()
            self._fewer = anyio.Event()
