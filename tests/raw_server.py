"""A loopback server that says the bytes it is told, for tests of what speaks to servers."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSListener

_ENDED = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.IncompleteRead, OSError)


class Visit:
    """A connection that a client has made."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._received = BufferedByteReceiveStream(stream)

    async def head(self) -> bytes:
        """The head of the next request, without the empty line; raises an error of anyio if there is none."""
        return await self._received.receive_until(b"\r\n\r\n", 1 << 20)

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next request."""
        head = await self.head()
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        size = int(length[1]) if length else 0
        return head, await self._received.receive_exactly(size) if size else b""

    async def something(self) -> bytes:
        """Whatever comes, at least a byte."""
        return await self._received.receive()

    async def say(self, data: bytes) -> None:
        await self._stream.send(data)

    async def no_more(self) -> None:
        """Say that nothing will be said any more."""
        await self._stream.send_eof()

    async def ended(self) -> None:
        """Wait until the client has ended the connection, or has reset it."""
        with contextlib.suppress(*_ENDED):
            while True:
                await self._stream.receive()

    def reset(self) -> None:
        """Make the end of this connection a reset."""
        raw = self._stream.extra(SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextlib.asynccontextmanager
async def raw_server(
    handle: Callable[[Visit], Awaitable[None]], *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    """Each connection is handled, and ended after that; gives the port. Errors of a connection that ended are none."""
    sockets = await anyio.create_tcp_listener(local_host=host, backlog=4096)
    listener = sockets if tls is None else TLSListener(sockets, tls)

    async def serve(stream: ByteStream) -> None:
        with contextlib.suppress(*_ENDED):
            async with stream:
                await handle(Visit(stream))

    async with sockets, anyio.create_task_group() as serving:
        serving.start_soon(listener.serve, serve)
        yield sockets.extra(SocketAttribute.local_port)
        serving.cancel_scope.cancel()


def answer(body: bytes = b"{}", *lines: bytes) -> bytes:
    """An answer with a length."""
    return b"\r\n".join((b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *lines, b"", body))


@contextlib.contextmanager
def full_backlog() -> Iterator[int]:
    """A port that takes no connection and refuses none."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
