"""Connection pool of one event loop.

Invariant: a connection is used by one exchange, or idle, or closed. An idle connection is not used after
``idle_seconds`` and is closed soon afterwards. :meth:`Pool.close` leaves none open.

The pool sets the deadline of connecting and does not know requests.
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

_READ_BYTES = 1 << 16
"""Size of the receive buffer that all connections share: a new buffer for each read doubles its CPU time."""

_CLOSED_PER_SWEEP, _SWEEP_SECONDS = 100, 0.01
"""Expired connections closed in one loop iteration, and the delay before the next ones: a close takes tens of
microseconds in the kernel, and thousands may expire together."""


class Pool:
    """All connections of one event loop. Idle connections are reused last in, first out."""

    def __init__(self, connect_seconds: float, idle_seconds: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._connect_seconds, self._idle_seconds = connect_seconds, idle_seconds
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._connections: set[Connection] = set()
        self._idle: dict[Origin, list[Connection]] = {}
        self._hosts: dict[Origin, Host] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None

    def pop_idle(self, origin: Origin) -> Connection | None:
        """Return an idle connection that is still usable, or ``None``."""
        idle = self._idle.get(origin)
        while idle and self.loop.time() - idle[-1].idle_since < self._idle_seconds:  # sweeps close the older ones
            connection = idle.pop()
            if connection.usable:
                return connection
            connection.abort()
        return None

    def release(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection for reuse, or close it if it is not usable."""
        if self.closed or not connection.usable:
            connection.abort()
            return
        connection.idle_since = self.loop.time()
        self._idle.setdefault(origin, []).append(connection)
        self._schedule_sweep(self._idle_seconds)

    async def connect(self, origin: Origin) -> Connection:
        """Open a new connection; raises OSError, which includes TimeoutError."""
        try:
            with anyio.fail_after(self._connect_seconds) as scope:
                connection = await self._open(origin)
        except TimeoutError:
            if scope.cancelled_caught:
                raise TimeoutError(f"not within {self._connect_seconds:g} s") from None
            raise
        self._connections.add(connection)
        if self.closed:
            connection.abort()
            raise ConnectionAbortedError("the pool was closed while connecting")
        return connection

    def close(self) -> None:
        """Close all connections at once."""
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections):
            connection.abort()

    async def _open(self, origin: Origin) -> Connection:
        host = self._hosts.get(origin)
        if host is None:
            host = self._hosts[origin] = Host(origin.host, origin.port)
        sock = await host.connect()
        try:
            _, connection = await self.loop.create_connection(
                lambda: Connection(self._buffer, self._connections.discard),
                sock=sock,
                ssl=self._tls_context() if origin.secure else None,
                server_hostname=origin.host if origin.secure else None,
            )
        except BaseException:
            with contextlib.suppress(OSError):  # the loop owns the socket and closes it at its end of file
                sock.shutdown(socket.SHUT_RDWR)
            raise
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _schedule_sweep(self, seconds: float) -> None:
        if self._sweep is None and self._idle:
            self._sweep = self.loop.call_later(seconds, self._close_expired)

    def _close_expired(self) -> None:
        self._sweep = None
        idle_before, left = self.loop.time() - self._idle_seconds, _CLOSED_PER_SWEEP
        for origin, idle in list(self._idle.items()):
            expired = 0  # the list is sorted, oldest first
            while expired < min(left, len(idle)) and idle[expired].idle_since <= idle_before:
                idle[expired].abort()
                expired += 1
            del idle[:expired]
            left -= expired
            if not idle:
                del self._idle[origin]
        self._schedule_sweep(self._idle_seconds if left else _SWEEP_SECONDS)
