"""Bytes to a URL and bytes back, over one pool of connections.

Invariant: every exception of the network ends here, as an error that says what can be proven about the request:
:class:`Unsent` (the server cannot have it) or :class:`Lost` (the server may be working on it). Nothing is ever sent
twice. The pool belongs to the event loop that opened it and is closed with it.

Its callers hold the deadlines, but for that of connecting. It knows nothing of what it carries.
"""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

import anyio
import anyio.lowlevel

from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.inference.http1 import Broken, Connection, NotHttp, Target

__all__ = ["Garbled", "Lost", "Transport", "Unsent", "shown"]

KEEPALIVE_SECONDS = 4.0
"""Idle connections are dropped before the server's 5 seconds are over, so that it seldom closes one in our hands."""


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


class _Pool:
    """The connections of one event loop, kept ones by where they lead; the last one used comes first."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.idle: dict[tuple[str, int, bool], list[tuple[Connection, float]]] = {}
        self.busy: set[Connection] = set()

    def take(self, target: Target) -> Connection | None:
        kept = self.idle.get((target.host, target.port, target.secure), [])
        now = time.monotonic()
        while kept:
            connection, since = kept.pop()
            if not connection.usable:
                continue
            if now - since < KEEPALIVE_SECONDS:
                return connection
            for old in (connection, *(older for older, _ in kept)):
                old.close()
            kept.clear()
        return None

    def give(self, target: Target, connection: Connection) -> None:
        if connection.usable:
            kept = self.idle.setdefault((target.host, target.port, target.secure), [])
            kept.append((connection, time.monotonic()))

    @property
    def connections(self) -> list[Connection]:
        return [*self.busy, *(connection for kept in self.idle.values() for connection, _ in kept)]


class Transport:
    """A pool of kept connections, and single-use ones beside it. Opens at first use; after a close, at the next use."""

    def __init__(self, *, connect_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._pool: _Pool | None = None
        self._holder: AsyncGenerator[None, None] | None = None
        self.opened = 0
        """How many pools were opened."""

    def __repr__(self) -> str:
        return f"<Transport: {'closed' if self._pool is None else 'open'}, opened {self.opened} times>"

    async def post(
        self, url: str, body: bytes | Sequence[bytes], headers: Mapping[str, str], *, fresh: bool = False
    ) -> tuple[int, bytes]:
        """Send one POST and read the whole answer.

        Args:
            url: where to.
            body: sent as it is; in parts, where joining them would copy much.
            headers: sent as they are.
            fresh: use a new connection and close it afterwards.

        Returns:
            The status and the body. A redirect is an answer like any other.

        Raises:
            Unsent: the server cannot have the request.
            Lost: the server may have the request; there is no whole answer.
            ConfigError: the URL is none.
        """
        return await self._request("POST", url, (body,) if isinstance(body, bytes) else body, headers, fresh)

    async def get(self, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send one GET over a new connection and read the whole answer; raises as :meth:`post` does."""
        return await self._request("GET", url, (), headers, True)

    async def aclose(self) -> None:
        """Close all connections."""
        if self._holder is not None:
            await self._holder.aclose()

    async def _request(
        self, method: str, url: str, body: Sequence[bytes], headers: Mapping[str, str], fresh: bool
    ) -> tuple[int, bytes]:
        pool = self._pool or await self._open()
        if pool.loop is not asyncio.get_running_loop():
            raise ConfigError("this connection pool belongs to another event loop; each loop needs its own policy")
        try:
            target = Target.of(url)
        except ValueError as error:
            raise ConfigError.of("Endpoint.base_url", shown(url), "a URL with a host") from error
        connection = None if fresh else pool.take(target)
        stale = connection is not None
        if connection is None:
            connection = await self._connect(target, f"{method} {shown(url)}")
        pool.busy.add(connection)
        try:
            return await connection.exchange(method, target, headers, body, last=fresh)
        except NotHttp as error:
            raise Garbled(f"{method} {shown(url)}: not an HTTP answer: {error}", stale=False) from error
        except Broken as error:
            where = "in the middle of" if error.answered else "before"
            raise Lost(
                f"{method} {shown(url)}: connection broke {where} the answer: {error}",
                stale=stale and not error.answered,
            ) from error
        finally:
            pool.busy.discard(connection)
            if pool is self._pool:
                pool.give(target, connection)
            else:
                connection.close()

    async def _connect(self, target: Target, what: str) -> Connection:
        try:
            with anyio.fail_after(self._connect_seconds):
                return await Connection.open(target)
        except (OSError, UnicodeError) as error:
            said = str(error)
            refusals = said.count(f"[Errno {errno.ECONNREFUSED}]")  # one for each address, where there are several
            refused = getattr(error, "errno", None) == errno.ECONNREFUSED or 0 < refusals == said.count("[Errno")
            raise Unsent(f"{what}: cannot connect: {_said(error)}", refused=refused) from error

    async def _open(self) -> _Pool:
        # No await reaches the loop between the test and the assignment: many first uses open one pool.
        self._pool = pool = _Pool()
        self._holder = self._hold(pool)
        self.opened += 1
        await anext(self._holder)
        return pool

    async def _hold(self, pool: _Pool) -> AsyncGenerator[None, None]:
        # The loop knows each async generator that was started in it and closes it when it shuts down.
        try:
            yield
        finally:
            self._pool = self._holder = None
            for connection in pool.connections:
                connection.close()
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()  # the loop closes the sockets at its next turn


def shown(url: str) -> str:
    """The URL without a user name and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def _said(error: BaseException) -> str:
    return shown(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
