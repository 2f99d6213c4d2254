"""Bytes to a URL and bytes back, over one pool of connections.

Invariant: every foreign exception of the HTTP library ends here, as an error that says what can be proven about the
request: :class:`Unsent` (the server cannot have it) or :class:`Lost` (the server may be working on it). Nothing is ever
sent twice. The pool belongs to the event loop that opened it and is closed with it.

This module sets no deadlines (its callers hold anyio scopes) and knows nothing of what it carries.
"""

from __future__ import annotations

import asyncio
import errno
import io
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel
import attrs

from rollouts.dtypes import without_password
from rollouts.errors import ConfigError, EndpointUnavailable

__all__ = ["Answer", "Garbled", "Lost", "Transport", "Unsent"]

KEEPALIVE_SECONDS = 4.0
"""Idle connections are dropped before the server's 5 seconds are over, so that it seldom closes one in our hands."""

CLOSE_SECONDS = 5.0

_LARGE_BODY = 1 << 20  # aiohttp warns about larger bodies as one piece of bytes


class Unsent(EndpointUnavailable):
    """No connection was made: the server cannot have the request."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused
        """Whether the machine itself said that nobody listens there."""


class Lost(EndpointUnavailable):
    """The connection broke before the whole answer was there: the server may still work on the request."""

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message)
        self.stale = stale
        """Whether it broke before the first byte of the answer, on a connection that may have been a kept one."""


class Garbled(Lost):
    """Something answered that does not speak HTTP."""


@attrs.frozen(eq=False)
class Answer:
    """An answer whose body is still on its way; of use only inside the context that gave it."""

    status: int
    headers: Mapping[str, str]
    """By name, in any case."""
    _content: aiohttp.StreamReader = attrs.field(repr=False)

    async def read(self) -> bytes:
        """The whole body, or what is left of it."""
        return await self._content.read()

    async def some(self) -> bytes:
        """What has come since, at least a byte; empty at the end of the body."""
        return await self._content.readany()


class _Exchange:
    """One request and its answer: no generator, since every turn goes through here several times."""

    __slots__ = ("_answer", "_answered", "_began", "_data", "_fresh", "_headers", "_method", "_transport", "_url")

    def __init__(
        self, transport: Transport, method: str, url: str, headers: Mapping[str, str], data: Any, fresh: bool
    ) -> None:
        self._transport = transport
        self._method, self._url, self._headers, self._data, self._fresh = method, url, headers, data, fresh
        self._answered = False

    async def __aenter__(self) -> Answer:
        session = await self._transport.session_for(self._fresh)
        self._began = time.monotonic()
        try:
            self._answer = await session.request(
                self._method, self._url, data=self._data, headers=self._headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            told, cause = self._told(error)
            raise told from cause
        self._answered = True
        return Answer(self._answer.status, self._answer.headers, self._answer.content)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._answer.__aexit__(kind, error, trace)
        if error is None:
            if not self._fresh:
                self._transport.kept_until = time.monotonic() + KEEPALIVE_SECONDS
        elif isinstance(error, aiohttp.ClientError | OSError):
            told, cause = self._told(error)
            raise told from cause

    def _told(self, error: Exception) -> tuple[Exception, Exception | None]:
        """What an error of the library says of the request, and what it is to be raised from."""
        what = _what(self._method, self._url)
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            refused = getattr(error, "errno", None) == errno.ECONNREFUSED
            return Unsent(f"{what}: cannot connect: {_said(error)}", refused=refused), error
        if isinstance(error, aiohttp.InvalidURL):
            return ConfigError.of("Endpoint.base_url", without_password(self._url), "a URL with a host"), error
        if isinstance(error, aiohttp.ClientResponseError):
            # Not chained: this error carries the request's headers, and with them the key.
            return Garbled(f"{what}: not an HTTP answer: {error.message}", stale=False), None
        stale = not self._fresh and not self._answered and self._began < self._transport.kept_until
        where = "in the middle of" if self._answered else "before"
        return Lost(f"{what}: connection broke {where} the answer: {_said(error)}", stale=stale), error


class Transport:
    """A pool of kept connections, and single-use ones beside it. Opens at first use; after a close, at the next use."""

    def __init__(self, *, connect_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None
        self._holder: AsyncGenerator[None, None] | None = None
        self.kept_until = -math.inf
        """``time.monotonic()`` until which a connection may be kept. Asking the library which one was taken costs a
        sixth of a turn, so a break before the answer is taken for that of a kept one while there may be any."""
        self.opened = 0
        """How many pools were opened."""

    def __repr__(self) -> str:
        return f"<Transport: {'closed' if self._sessions is None else 'open'}, opened {self.opened} times>"

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], *, fresh: bool = False
    ) -> tuple[int, bytes]:
        """Send one POST and read the whole answer.

        Args:
            url: where to.
            body: sent as it is.
            headers: sent as they are.
            fresh: use a new connection and close it afterwards.

        Returns:
            The status and the body. A redirect is an answer like any other.

        Raises:
            Unsent: the server cannot have the request.
            Lost: the server may have the request; there is no whole answer.
            ConfigError: the URL is none.
        """
        data = io.BytesIO(body) if len(body) > _LARGE_BODY else body
        return await self._request("POST", url, data, headers, fresh)

    async def get(self, url: str, headers: Mapping[str, str], *, fresh: bool = True) -> tuple[int, bytes]:
        """Send one GET, over a new connection by default, and read the whole answer; raises as :meth:`post` does."""
        return await self._request("GET", url, None, headers, fresh)

    async def aclose(self) -> None:
        """Close all connections."""
        if self._holder is not None:
            await self._holder.aclose()

    async def _request(
        self, method: str, url: str, data: Any, headers: Mapping[str, str], fresh: bool
    ) -> tuple[int, bytes]:
        async with self.open(method, url, headers, data, fresh=fresh) as answer:
            return answer.status, await answer.read()

    def open(
        self, method: str, url: str, headers: Mapping[str, str], data: Any = None, *, fresh: bool = False
    ) -> AbstractAsyncContextManager[Answer]:
        """Send one request and read its answer piece by piece inside the context; raises as :meth:`post` does."""
        return _Exchange(self, method, url, headers, data, fresh)

    async def session_for(self, fresh: bool) -> aiohttp.ClientSession:
        """The pool of kept connections, or that of single-use ones."""
        kept, single = self._sessions or await self._open()
        if self._loop is not asyncio.get_running_loop():
            raise ConfigError("this connection pool belongs to another event loop; each loop needs its own policy")
        return single if fresh else kept

    async def _open(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        # No await reaches the loop between the test and the assignment: many first uses open one pool.
        sessions = (self._session(force_close=False), self._session(force_close=True))
        self._loop, self._sessions, self._holder = asyncio.get_running_loop(), sessions, self._hold(sessions)
        self.opened += 1
        await anext(self._holder)
        return sessions

    async def _hold(self, sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession]) -> AsyncGenerator[None, None]:
        # The loop knows each async generator that was started in it and closes it when it shuts down.
        try:
            yield
        finally:
            self._loop = self._sessions = self._holder = None
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                for session in sessions:
                    await session.close()
                await anyio.lowlevel.checkpoint()  # older aiohttp closes its sockets one turn of the loop later

    def _session(self, *, force_close: bool) -> aiohttp.ClientSession:
        if force_close:  # which the library does not take together with a timeout
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
        )


def _what(method: str, url: str) -> str:
    return f"{method} {without_password(url)}"


def _said(error: BaseException) -> str:
    return without_password(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
