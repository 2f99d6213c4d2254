"""Connections that are kept for the next request, and new ones.

Invariant: a connection is in the hands of one exchange, or idle, or ended; an idle one is neither used nor left open
long after its time. All of them belong to one event loop; :meth:`Pool.close` leaves none open.

It sets the deadline of connecting, and knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import anyio

from rollouts.http.connect import Host
from rollouts.http.connection import Connection
from rollouts.http.request import Origin

__all__ = ["Pool"]

_READ_AT_ONCE = 1 << 16
"""Bytes that are read from a socket in one go, into one buffer for all of them: fresh memory for each costs as much as
all the rest."""

_ENDED_AT_ONCE, _ENDING_SECONDS = 100, 0.01
"""Of thousands of idle connections so many are ended in one turn of the loop, and how soon the next: the kernel takes
tens of microseconds for each."""


class Pool:
    """The connections of one event loop; of the idle ones, the one that was used last is taken first."""

    def __init__(self, connect_seconds: float, idle_seconds: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._connect_seconds, self._idle_seconds = connect_seconds, idle_seconds
        self._buffer = memoryview(bytearray(_READ_AT_ONCE))
        self._connections: set[Connection] = set()
        self._idle: dict[Origin, list[Connection]] = {}
        self._hosts: dict[Origin, Host] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None

    def take(self, origin: Origin) -> Connection | None:
        """One that was kept, if there is any."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.usable and self.loop.time() - connection.idle_since < self._idle_seconds:
                return connection
            connection.abort()
        return None

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """Keep it if it may be used again, else end it."""
        if self.closed or not connection.usable:
            connection.abort()
            return
        connection.idle_since = self.loop.time()
        self._idle.setdefault(origin, []).append(connection)
        self._sweep_later(self._idle_seconds)

    async def connect(self, origin: Origin) -> Connection:
        """A new one; raises OSError."""
        try:
            with anyio.fail_after(self._connect_seconds) as scope:
                connection = await self._connected(origin)
        except TimeoutError:
            if scope.cancelled_caught:
                raise TimeoutError(f"not within {self._connect_seconds:g} s") from None
            raise
        self._connections.add(connection)
        if self.closed:
            connection.abort()
            raise ConnectionAbortedError("its pool was closed meanwhile")
        return connection

    def close(self) -> None:
        """End all of them at once."""
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections):
            connection.abort()

    async def _connected(self, origin: Origin) -> Connection:
        host = self._hosts.get(origin)
        if host is None:
            host = self._hosts[origin] = Host(origin.host, origin.port)
        dialled = await host.connect()
        name = origin.host if origin.secure else None
        try:
            _, connection = await self.loop.create_connection(
                lambda: Connection(self._buffer, self._connections.discard),
                sock=dialled,
                ssl=self._context() if origin.secure else None,
                server_hostname=name,
            )
        except BaseException:
            with contextlib.suppress(OSError):  # the loop owns the socket by now: it sees its end, and closes it
                dialled.shutdown(socket.SHUT_RDWR)
            raise
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _sweep_later(self, seconds: float) -> None:
        if self._sweep is None and self._idle:
            self._sweep = self.loop.call_later(seconds, self._end_old_ones)

    def _end_old_ones(self) -> None:
        self._sweep = None
        youngest, left = self.loop.time() - self._idle_seconds, _ENDED_AT_ONCE
        for origin, idle in list(self._idle.items()):
            old = 0  # the oldest stand first
            while old < min(left, len(idle)) and idle[old].idle_since <= youngest:
                idle[old].abort()
                old += 1
            del idle[:old]
            left -= old
            if not idle:
                del self._idle[origin]
        self._sweep_later(self._idle_seconds if left else _ENDING_SECONDS)
