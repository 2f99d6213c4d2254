"""Bytes to a URL and bytes back, over one pool of connections.

Invariant: every exception of the network ends here, as an error that says what can be proven about the request:
:class:`ConnectFailed` (the server cannot have it) or :class:`ConnectionLost` (the server may be working on it). Nothing
is ever sent twice. The pool belongs to the event loop that opened it and is closed with it.

It sets no deadline but that of connecting (its callers hold anyio scopes), follows no redirect, keeps no cookie, asks
no proxy, and knows nothing of what it carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import anyio
import anyio.lowlevel
import attrs

from rollouts.dtypes import without_password
from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.http.connection import HEAD, SOME, WHOLE, Connection
from rollouts.http.pool import Pool
from rollouts.http.request import request_head

__all__ = ["ConnectFailed", "ConnectionLost", "HttpClient", "ProtocolError", "Response"]

KEEPALIVE_SECONDS = 4.0
"""Idle connections are dropped before the server's 5 seconds are over, so that it seldom closes one in our hands."""


class ConnectFailed(EndpointUnavailable):
    """No connection was made: the server cannot have the request."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused
        """Whether the machine itself said that nobody listens there."""


class ConnectionLost(EndpointUnavailable):
    """The connection broke before the whole answer was there: the server may still work on the request."""

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message)
        self.stale = stale
        """Whether it broke before the first byte of the answer, on a connection that was kept from a request before."""


class ProtocolError(ConnectionLost):
    """Something answered that does not speak HTTP."""


class _Headers(Mapping[str, str]):
    """Those of an answer by name, in any case; of several with one name the first."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._values = {name.decode("latin-1").lower(): value for name, value in reversed(headers)}

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()].decode(errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Exchange:
    """One request and its answer: no generator, since every turn goes through here several times."""

    __slots__ = (
        "_body",
        "_connection",
        "_fresh",
        "_headers",
        "_method",
        "_origin",
        "_pool",
        "_transport",
        "_url",
    )

    def __init__(
        self, transport: HttpClient, method: str, url: str, headers: Mapping[str, str], body: bytes | None, fresh: bool
    ) -> None:
        self._transport = transport
        self._method, self._url, self._headers, self._body, self._fresh = method, url, headers, body, fresh

    async def __aenter__(self) -> Response:
        connection = await self.ask(piecewise=True)
        try:
            await self.wait_for(HEAD)
        except BaseException:
            self.end()
            raise
        return Response(connection.status, _Headers(connection.headers), self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    async def ask(self, *, piecewise: bool = False) -> Connection:
        """Write the request, on a kept connection or on a new one."""
        self._origin, head = request_head(self._method, self._url, tuple(self._headers.items()), self._fresh)
        self._pool = pool = await self._transport.pool()
        connection = None if self._fresh else pool.take(self._origin)
        if connection is None:
            try:
                connection = await pool.connect(self._origin)
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError)
                raise ConnectFailed(f"{self._what}: cannot connect: {_message(error)}", refused=refused) from error
        self._connection = connection
        connection.ask(head, self._body, piecewise=piecewise)
        return connection

    async def wait_for(self, awaited: int) -> None:
        """Wait for so much of the answer."""
        connection = self._connection
        if await connection.wait_for(awaited):
            return
        if connection.garbled:
            raise ProtocolError(f"{self._what}: not an HTTP answer: {connection.garbled}", stale=False)
        where = "in the middle of" if connection.begun else "before"
        reason = "the server closed it" if connection.reason is None else _message(connection.reason)
        told = f"{self._what}: connection broke {where} the answer: {reason}"
        raise ConnectionLost(told, stale=connection.stale) from connection.reason

    def body(self) -> bytes:
        """What there is of the body."""
        return self._connection.body()

    def end(self) -> None:
        """Give the connection back; one that was for this alone, or whose answer is not all there, ends at once."""
        if self._fresh:
            self._connection.abort()
        else:
            self._pool.give_back(self._origin, self._connection)
        del self._connection  # another exchange may have it

    @property
    def _what(self) -> str:
        return f"{self._method} {without_password(self._url)}"


@attrs.frozen(eq=False)
class Response:
    """An answer whose body is still on its way; of use only inside the context that gave it."""

    status: int
    headers: Mapping[str, str]
    """By name, in any case; of several with one name the first."""
    _exchange: _Exchange = attrs.field(repr=False)

    async def read(self) -> bytes:
        """The whole body, or what is left of it."""
        await self._exchange.wait_for(WHOLE)
        return self._exchange.body()

    async def read_chunk(self) -> bytes:
        """What has come since, at least a byte; empty at the end of the body."""
        await self._exchange.wait_for(SOME)
        return self._exchange.body()


class HttpClient:
    """A pool of kept connections, and single-use ones beside it. Opens at first use; after a close, at the next use."""

    def __init__(self, *, connect_seconds: float, idle_seconds: float = KEEPALIVE_SECONDS) -> None:
        self._connect_seconds, self._idle_seconds = connect_seconds, idle_seconds
        self._pool: Pool | None = None
        self._holder: AsyncGenerator[None, None] | None = None
        self.opened = 0
        """How many pools were opened."""

    def __repr__(self) -> str:
        return f"<Transport: {'closed' if self._pool is None else 'open'}, opened {self.opened} times>"

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
            ConnectFailed: the server cannot have the request.
            Lost: the server may have the request; there is no whole answer.
            ConfigError: the URL is none, or a header cannot be sent.
        """
        return await self._request("POST", url, body, headers, fresh)

    async def get(self, url: str, headers: Mapping[str, str], *, fresh: bool = True) -> tuple[int, bytes]:
        """Send one GET, over a new connection by default, and read the whole answer; raises as :meth:`post` does."""
        return await self._request("GET", url, None, headers, fresh)

    async def aclose(self) -> None:
        """Close all connections."""
        if self._holder is not None:
            await self._holder.aclose()

    async def _request(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], fresh: bool
    ) -> tuple[int, bytes]:
        exchange = _Exchange(self, method, url, headers, body, fresh)
        connection = await exchange.ask()
        try:
            await exchange.wait_for(WHOLE)
            return connection.status, connection.body()
        finally:
            exchange.end()

    def open(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, *, fresh: bool = False
    ) -> AbstractAsyncContextManager[Response]:
        """Send one request and read its answer piece by piece inside the context; raises as :meth:`post` does."""
        return _Exchange(self, method, url, headers, body, fresh)

    async def pool(self) -> Pool:
        """The pool of this event loop."""
        pool = self._pool or await self._open()
        if pool.loop is not asyncio.get_running_loop():
            raise ConfigError("this connection pool belongs to another event loop; each loop needs its own policy")
        return pool

    async def _open(self) -> Pool:
        # No await reaches the loop between the test and the assignment: many first uses open one pool.
        self._pool = pool = Pool(self._connect_seconds, self._idle_seconds)
        self._holder = self._hold(pool)
        self.opened += 1
        await anext(self._holder)
        return pool

    async def _hold(self, pool: Pool) -> AsyncGenerator[None, None]:
        # The loop knows each async generator that was started in it and closes it when it shuts down.
        try:
            yield
        finally:
            self._pool = self._holder = None
            pool.close()
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()  # the loop closes the sockets at its next turn


def _message(error: BaseException) -> str:
    return without_password(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
