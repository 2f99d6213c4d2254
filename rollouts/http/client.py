"""HTTP client over one connection pool.

Invariant: every network exception becomes :class:`ConnectFailed` (the server did not receive the request) or
:class:`ConnectionLost` (the server may be processing it). No request is sent twice. The pool belongs to the event loop
that opened it and is closed with it. The bytes received of a response are bounded; for a response read as a whole, by
the caller.

The only deadline set here limits connecting; callers use anyio scopes. Redirects, cookies and proxies are not
supported. The client does not know what the payloads mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager

import anyio
import anyio.lowlevel
import attrs

from rollouts.errors import ConfigError, EndpointUnavailable, without_password
from rollouts.http.connection import DATA, END_OF_MESSAGE, HEADERS, MAX_RESPONSE_BYTES, Connection
from rollouts.http.pool import Pool
from rollouts.http.request import request_head

__all__ = ["ConnectFailed", "ConnectionLost", "HttpClient", "ProtocolError", "Response"]

KEEPALIVE_SECONDS = 4.0
"""Shorter than the 5 seconds after which a server closes an idle connection (SGLang 0.5.23:
SGLANG_TIMEOUT_KEEP_ALIVE)."""


class ConnectFailed(EndpointUnavailable):
    """No connection was opened: the server did not receive the request."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused
        """Whether the host refused the connection: no process listens on the port."""


class ConnectionLost(EndpointUnavailable):
    """The connection broke before the response was complete: the server may still process the request."""

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message)
        self.stale = stale
        """Whether a reused connection broke before the first byte of the response."""


class ProtocolError(ConnectionLost):
    """The received bytes are not an HTTP response, or too many."""


class _Headers(Mapping[str, str]):
    """Response headers by case-insensitive name; the first of several with one name."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._values = {name.decode("latin-1").lower(): value for name, value in reversed(headers)}

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()].decode(errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Exchange:
    """One request and its response. A class, since a generator context manager costs more CPU per turn."""

    __slots__ = (
        "_body",
        "_connection",
        "_headers",
        "_max_bytes",
        "_method",
        "_new_connection",
        "_origin",
        "_pool",
        "_transport",
        "_url",
    )

    def __init__(
        self,
        transport: HttpClient,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        new_connection: bool,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._transport, self._max_bytes = transport, max_bytes
        self._method, self._url, self._headers, self._body = method, url, headers, body
        self._new_connection = new_connection

    async def __aenter__(self) -> Response:
        connection = await self.send(streamed=True)
        try:
            await self.wait_for(HEADERS)
        except BaseException:
            self.release()
            raise
        return Response(connection.status, _Headers(connection.headers), self)

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def send(self, *, streamed: bool = False) -> Connection:
        """Send the request over an idle connection or a new one."""
        self._origin, head = request_head(self._method, self._url, tuple(self._headers.items()), self._new_connection)
        self._pool = pool = await self._transport.pool()
        connection = None if self._new_connection else pool.pop_idle(self._origin)
        if connection is None:
            try:
                connection = await pool.connect(self._origin)
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError)
                raise ConnectFailed(f"{self._what}: cannot connect: {_message(error)}", refused=refused) from error
        self._connection = connection
        connection.send_request(head, self._body, streamed=streamed, max_bytes=self._max_bytes)
        return connection

    async def wait_for(self, awaited: int) -> None:
        """Wait for a part of the response; raise if it cannot come any more."""
        connection = self._connection
        if await connection.wait_for(awaited):
            return
        if connection.protocol_error:
            raise ProtocolError(f"{self._what}: {connection.protocol_error}", stale=False)
        where = "in the middle of" if connection.response_started else "before"
        reason = "the server closed it" if connection.lost_by is None else _message(connection.lost_by)
        message = f"{self._what}: connection broke {where} the response: {reason}"
        raise ConnectionLost(message, stale=connection.stale) from connection.lost_by

    def body(self) -> bytes:
        """Return the unread part of the body."""
        return self._connection.body()

    def release(self) -> None:
        """Return the connection to the pool, or close it if it was for this request only."""
        if self._new_connection:
            self._connection.abort()
        else:
            self._pool.release(self._origin, self._connection)
        del self._connection  # another exchange may use it from now on

    @property
    def _what(self) -> str:
        return f"{self._method} {without_password(self._url)}"


@attrs.frozen(eq=False)
class Response:
    """A response whose body is still being received; valid inside its context only."""

    status: int
    headers: Mapping[str, str]
    """By case-insensitive name; the first of several with one name."""
    _exchange: _Exchange = attrs.field(repr=False)

    async def read(self) -> bytes:
        """Return the body, or the rest of it after :meth:`read_chunk`."""
        await self._exchange.wait_for(END_OF_MESSAGE)
        return self._exchange.body()

    async def read_chunk(self) -> bytes:
        """Wait for more of the body and return it, at least one byte; empty at its end."""
        await self._exchange.wait_for(DATA)
        return self._exchange.body()


class HttpClient:
    """HTTP client with a pool of connections. The pool opens at first use, and again at the first use after a close."""

    def __init__(self, *, connect_seconds: float, idle_seconds: float = KEEPALIVE_SECONDS) -> None:
        self._connect_seconds, self._idle_seconds = connect_seconds, idle_seconds
        self._pool: Pool | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        self.opened = 0
        """Number of pools opened."""

    def __repr__(self) -> str:
        return f"<HttpClient: {'closed' if self._pool is None else 'open'}, opened {self.opened} times>"

    def post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        new_connection: bool = False,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> Awaitable[tuple[int, bytes]]:
        """Send one POST and read the complete response.

        Args:
            url: absolute ``http`` or ``https`` URL.
            body: sent unchanged.
            headers: sent unchanged.
            new_connection: use a new connection and close it afterwards.
            max_bytes: limit of the response; a longer one is a :class:`ProtocolError`.

        Returns:
            The status and the body. Redirects are not followed.

        Raises:
            ConnectFailed: the server did not receive the request.
            ConnectionLost: the server may have received the request; the response is incomplete or invalid.
            ConfigError: invalid URL or header.
        """
        return _whole(_Exchange(self, "POST", url, headers, body, new_connection, max_bytes))

    async def get(self, url: str, headers: Mapping[str, str], *, new_connection: bool = True) -> tuple[int, bytes]:
        """Send one GET, over a new connection by default, and read the response; raises as :meth:`post` does."""
        return await _whole(_Exchange(self, "GET", url, headers, None, new_connection))

    async def aclose(self) -> None:
        """Close all connections."""
        if self._closer is not None:
            await self._closer.aclose()

    def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        new_connection: bool = False,
    ) -> AbstractAsyncContextManager[Response]:
        """Send one request and stream its response inside the context; raises as :meth:`post` does."""
        return _Exchange(self, method, url, headers, body, new_connection)

    async def pool(self) -> Pool:
        """Return the pool; raises ConfigError in an event loop that did not open it."""
        pool = self._pool or await self._open()
        if pool.loop is not asyncio.get_running_loop():
            raise ConfigError("this connection pool belongs to another event loop; each loop needs a separate policy")
        return pool

    async def _open(self) -> Pool:
        # No await between the check for None and this assignment: concurrent first uses open one pool.
        self._pool = pool = Pool(self._connect_seconds, self._idle_seconds)
        self._closer = self._close_with_loop(pool)
        self.opened += 1
        await anext(self._closer)
        return pool

    async def _close_with_loop(self, pool: Pool) -> AsyncGenerator[None, None]:
        # An event loop closes its suspended async generators when it shuts down.
        try:
            yield
        finally:
            self._pool = self._closer = None
            pool.close()
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()  # the loop closes the sockets in its next iteration


async def _whole(exchange: _Exchange) -> tuple[int, bytes]:
    """Send a request and read the complete response."""
    connection = await exchange.send()
    try:
        await exchange.wait_for(END_OF_MESSAGE)
        return connection.status, connection.body()
    finally:
        exchange.release()


def _message(error: BaseException) -> str:
    return without_password(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
