"""A loopback server that sends arbitrary bytes, for tests of HTTP clients."""

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

_CLOSED = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.IncompleteRead, OSError)


class Visit:
    """One accepted connection."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._received = BufferedByteReceiveStream(stream)

    async def head(self) -> bytes:
        """Receive the head of the next request, without the empty line; raises an anyio error at its end."""
        return await self._received.receive_until(b"\r\n\r\n", 1 << 20)

    async def request(self) -> tuple[bytes, bytes]:
        """Receive head and body of the next request."""
        head = await self.head()
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        size = int(length[1]) if length else 0
        return head, await self._received.receive_exactly(size) if size else b""

    async def something(self) -> bytes:
        """Receive at least one byte."""
        return await self._received.receive()

    async def say(self, data: bytes) -> None:
        await self._stream.send(data)

    async def no_more(self) -> None:
        """Close the sending direction."""
        await self._stream.send_eof()

    async def ended(self) -> None:
        """Wait until the client has closed or reset the connection."""
        with contextlib.suppress(*_CLOSED):
            while True:
                await self._stream.receive()

    def reset(self) -> None:
        """Close with a reset (RST) instead of FIN."""
        raw = self._stream.extra(SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextlib.asynccontextmanager
async def raw_server(
    handle: Callable[[Visit], Awaitable[None]], *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    """Run ``handle`` for each connection, then close it; yields the port. Errors of a closed connection are ignored."""
    sockets = await anyio.create_tcp_listener(local_host=host, backlog=4096)
    listener = sockets if tls is None else TLSListener(sockets, tls)

    async def serve(stream: ByteStream) -> None:
        with contextlib.suppress(*_CLOSED):
            async with stream:
                await handle(Visit(stream))

    async with sockets, anyio.create_task_group() as serving:
        serving.start_soon(listener.serve, serve)
        yield sockets.extra(SocketAttribute.local_port)
        serving.cancel_scope.cancel()


def answer(body: bytes = b"{}", *lines: bytes) -> bytes:
    """A 200 response with Content-Length."""
    return b"\r\n".join((b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *lines, b"", body))


@contextlib.contextmanager
def full_backlog(port: int = 0) -> Iterator[int]:
    """A port, by default any free one, that neither accepts nor refuses connections."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
