"""Bytes over HTTP: one pool of connections, and two ways in which a request can fail.

Invariant: a request that raises :class:`NotSentError` never reached a server; one that raises :class:`LostError` may
have, and the server may still be working on it. Foreign exceptions are mapped here and nowhere else. Deadlines belong
to the caller: what is cancelled closes its connection.

This module knows nothing of tokens or of what the bytes mean.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

import aiohttp
import attrs

__all__ = ["Answer", "LostError", "NotSentError", "Transport"]

_KEEP_ALIVE_SECONDS = 4.0
"""Idle connections are closed before SGLang's server does (5 s), which would lose the request that reuses one."""


class NotSentError(Exception):
    """No connection could be made: nobody has seen the request."""


class LostError(Exception):
    """The connection broke after the request may have been sent."""


@attrs.frozen
class Answer:
    """A whole HTTP response."""

    status: int
    body: bytes


class Transport:
    """A pool without a limit of its own: whoever sends decides how much is in flight."""

    def __init__(self, *, connect_seconds: float, headers: Mapping[str, str] | None = None) -> None:
        self._connect_seconds = connect_seconds
        self._headers = dict(headers or {})
        self._lifetime: AsyncGenerator[aiohttp.ClientSession, None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request and read the whole answer, whatever its status.

        Raises:
            NotSentError: no connection.
            LostError: the connection broke later on.
        """
        session = await self._open()
        try:
            async with session.request(method, url, data=body, headers=headers) as response:
                return Answer(response.status, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise NotSentError(f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise LostError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        """Close every connection; the next request opens new ones."""
        lifetime, self._lifetime, self._session = self._lifetime, None, None
        if lifetime is not None:
            await lifetime.aclose()

    async def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The generator's first step runs without a switch of tasks, so there is one session however many ask.
            self._lifetime = self._live()
            self._session = await anext(self._lifetime)
        return self._session

    async def _live(self) -> AsyncGenerator[aiohttp.ClientSession, None]:
        # A generator, because an event loop that ends closes the asynchronous generators that began in it: a pool that
        # nobody closed by hand is closed then, without a warning.
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
            headers={"Content-Type": "application/json", **self._headers},
        )
        try:
            yield session
        finally:
            await session.close()
