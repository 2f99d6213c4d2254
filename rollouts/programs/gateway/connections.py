"""The connections of the gateway: how many there are, who has them, and how long a head may take.

Invariant: connections leave a part of the process's file descriptors free, one session has a part of them, and a
client that sends no whole head is closed. If there are too many, an idle connection of the owner with the most is
closed. A listening socket without a file descriptor for its next connection closes that connection, and writes
nothing. Bytes that are not HTTP are answered and not logged.

This module knows no route and no session.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import Counter
from typing import Any

from aiohttp import web

__all__ = ["BACKLOG", "Connection", "Connections", "Listener", "most_connections"]

BACKLOG = 128
"""Connections that wait to be accepted."""
_MOST = 1 << 14
_HEADER_BYTES = 1 << 16
_KEEP_ALIVE = 3600.0
"""Seconds; a server that closes idle connections loses requests that are sent at that moment."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_connections() -> int:
    """The number of connections that leaves a quarter of the file descriptors to the rest of the process."""
    try:
        import resource  # here: Windows has none
    except ImportError:
        return _MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(soft * 3 // 4, _MOST), 16)


class Connections(web.Server):
    """Makes and counts the connections of one server.

    Args:
        handler: called with each request, whose ``protocol`` is a :class:`Connection`.
        malformed: answers bytes that are not HTTP.
        most: the number of connections.
        most_of_one: the number of connections of one owner.
        head_seconds: how long a client may take to send the head of a request.
    """

    def __init__(self, handler: Any, malformed: Any, *, most: int, most_of_one: int, head_seconds: float) -> None:
        super().__init__(handler, handler_cancellation=True)
        self.malformed, self.head_seconds = malformed, head_seconds
        self._most, self._most_of_one = most, most_of_one
        self._open: dict[Connection, None] = {}
        self._owned: Counter[object] = Counter()

    def __call__(self) -> Connection:
        return Connection(self)

    def add(self, connection: Connection) -> None:
        """Count a new connection; if there are too many, close an idle one, or this one."""
        self._open[connection] = None
        self._owned[connection.owner] += 1
        if len(self._open) > self._most:
            idle = [one for one in self._open if not one.busy and one is not connection]
            closed = max(idle, key=lambda one: self._owned[one.owner]) if idle else connection
            self.remove(closed)
            closed.force_close()

    def remove(self, connection: Connection) -> None:
        """Stop counting a connection."""
        if connection in self._open:
            del self._open[connection]
            self._own(connection.owner, -1)

    def own(self, connection: Connection, owner: object) -> bool:
        """Record whose requests a connection sends; false if the owner has too many already."""
        if connection.owner != owner and connection in self._open:
            if self._owned[owner] >= self._most_of_one:
                return False
            self._own(connection.owner, -1)
            self._own(owner, 1)
            connection.owner = owner
        return True

    def _own(self, owner: object, more: int) -> None:
        self._owned[owner] += more
        if not self._owned[owner]:
            del self._owned[owner]


class Connection(web.RequestHandler):
    """One connection.

    Attributes:
        owner: whose requests it sends; ``None`` before the first request with a known key.
        busy: whether a request is being answered.
    """

    def __init__(self, connections: Connections) -> None:
        super().__init__(
            connections,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # no log
            keepalive_timeout=_KEEP_ALIVE,
            max_field_size=_HEADER_BYTES,
            max_line_size=_HEADER_BYTES,
            auto_decompress=False,
        )
        self.owner: object = None
        self.busy = False
        self._connections_of_server = connections
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first head."""
        super().connection_made(transport)
        self._wait_for_head()
        self._connections_of_server.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop counting it."""
        self._stop_waiting()
        self._connections_of_server.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a head whose first bytes these are."""
        if not self.busy and self._late is None:
            self._wait_for_head()
        super().data_received(data)

    def begin(self) -> None:
        """The head is there; while ``busy`` is set, the connection is not closed for another one."""
        self._stop_waiting()
        self.busy = True

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are not HTTP without a log entry: it is the client's mistake."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        response: web.StreamResponse = self._connections_of_server.malformed(message)
        response.force_close()
        return response

    def _wait_for_head(self) -> None:
        seconds = self._connections_of_server.head_seconds
        self._late = asyncio.get_running_loop().call_later(seconds, self.force_close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Listener(socket.socket):
    """A listening socket that keeps a file descriptor for the connections that it cannot accept.

    An event loop asks again as long as a connection waits, and logs each error.

    Args:
        sock: the socket that listens; it is closed with this one.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.family, sock.type, sock.proto, os.dup(sock.fileno()))
        self._given = sock
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; close it if the process has no file descriptor for it.

        Raises:
            BlockingIOError: no connection waits, or it was closed.
        """
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
        self._close_next()
        raise BlockingIOError

    def close(self) -> None:
        """Close it, and the descriptor that it keeps."""
        self._give_up_spare()
        self._given.close()
        super().close()

    def detach(self) -> int:
        """Release its descriptor without closing it, and close the others: uvloop ends a server by this call."""
        self._give_up_spare()
        self._given.close()
        return super().detach()

    def _close_next(self) -> None:
        self._give_up_spare()
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _give_up_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
