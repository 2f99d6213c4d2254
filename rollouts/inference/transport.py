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
from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel

from rollouts.dtypes import without_password
from rollouts.errors import ConfigError, EndpointUnavailable

__all__ = ["Garbled", "Lost", "Transport", "Unsent"]

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
        """Whether it was a kept connection that broke before the first byte of the answer."""


class Garbled(Lost):
    """Something answered that does not speak HTTP."""


class Transport:
    """A pool of kept connections, and single-use ones beside it. Opens at first use; after a close, at the next use."""

    def __init__(self, *, connect_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None
        self._holder: AsyncGenerator[None, None] | None = None
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

    async def get(self, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send one GET over a new connection and read the whole answer; raises as :meth:`post` does."""
        return await self._request("GET", url, None, headers, True)

    async def aclose(self) -> None:
        """Close all connections."""
        if self._holder is not None:
            await self._holder.aclose()

    async def _request(
        self, method: str, url: str, data: Any, headers: Mapping[str, str], fresh: bool
    ) -> tuple[int, bytes]:
        kept, single = self._sessions or await self._open()
        if self._loop is not asyncio.get_running_loop():
            raise ConfigError("this connection pool belongs to another event loop; each loop needs its own policy")
        seen = SimpleNamespace(reused=False, answered=False)
        what = f"{method} {without_password(url)}"
        try:
            async with (single if fresh else kept).request(
                method, url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=seen
            ) as answer:
                seen.answered = True
                return answer.status, await answer.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            refused = getattr(error, "errno", None) == errno.ECONNREFUSED
            raise Unsent(f"{what}: cannot connect: {_said(error)}", refused=refused) from error
        except aiohttp.InvalidURL as error:
            raise ConfigError.of("Endpoint.base_url", without_password(url), "a URL with a host") from error
        except aiohttp.ClientResponseError as error:
            # Not chained: this error carries the request's headers, and with them the key.
            raise Garbled(f"{what}: not an HTTP answer: {error.message}", stale=False) from None
        except (aiohttp.ClientError, OSError) as error:
            stale = seen.reused and not seen.answered
            where = "in the middle of" if seen.answered else "before"
            raise Lost(f"{what}: connection broke {where} the answer: {_said(error)}", stale=stale) from error

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
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_mark_reused)
        if force_close:  # which the library does not take together with a timeout
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
        )


async def _mark_reused(_session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
    context.trace_request_ctx.reused = True


def _said(error: BaseException) -> str:
    return without_password(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
