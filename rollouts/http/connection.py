"""One HTTP/1.1 client connection, for one request after another.

Invariant: a response belongs to the one request that was sent before it. A connection is reused only in :data:`IDLE`:
unsolicited bytes, an abandoned request or ``Connection: close`` end in another state.

llhttp parses the responses. The connection requests no compression and no upgrade, and does not pipeline. It does not
know pools, deadlines or payloads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

__all__ = ["DATA", "END_OF_MESSAGE", "HEADERS", "MAX_RESPONSE_BYTES", "Connection", "ConnectionState"]


class ConnectionState(IntEnum):
    """State of a connection and of its last response.

    :meth:`Connection.send_request` enters ``ACTIVE``, the end of the response ``IDLE`` or ``MUST_CLOSE``. Unsolicited
    bytes turn ``IDLE`` into ``MUST_CLOSE``. A close turns ``ACTIVE`` into ``ERROR``, any other state into ``CLOSED``.
    """

    NEW = 0  # no request was sent
    IDLE = 1  # the response is complete; the next request may be sent
    ACTIVE = 2  # a request was sent; its response is incomplete
    MUST_CLOSE = 3  # the response is complete; no other request may be sent
    CLOSED = 4  # without an incomplete response
    ERROR = 5  # closed with an incomplete response


NEW, IDLE, ACTIVE, MUST_CLOSE, CLOSED, ERROR = ConnectionState  # as globals: they are read for every event

HEADERS, DATA, END_OF_MESSAGE = range(3)
"""Parts that :meth:`Connection.wait_for` waits for: status and headers, more of the body, or the complete response."""

HIGH_WATER = 1 << 18
"""Unread bytes above which a streamed response pauses reading from the socket."""

MAX_RESPONSE_BYTES = 1 << 26
"""Default limit of a response that is received as a whole."""

_MAX_HEAD_BYTES = 1 << 18
_MAX_JOINED_BODY = 1 << 20
"""A body of at most so many bytes (some 170,000 ids) is joined with its head for one write, which costs less than two.
A longer body is written without a copy."""


class Connection(asyncio.BufferedProtocol):
    """One connection, created by the event loop.

    Args:
        buffer: receive buffer; all connections of one event loop may share it.
        on_closed: called with the connection when it is closed.
    """

    def __init__(self, buffer: memoryview, on_closed: Callable[[Connection], object]) -> None:
        self._buffer, self._on_closed = buffer, on_closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        # As lenient as other clients: folded headers, lines without CR, spaces after a chunk size.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._waiter: asyncio.Future[None] | None = None
        self._awaited = END_OF_MESSAGE
        self._chunks: list[bytes] = []
        self._unread = 0
        self._streamed = self._reading_paused = False
        self.state = NEW
        self.requests = 0
        """Requests sent."""
        self.idle_since = 0.0
        """Event loop time of its last release to the pool."""
        self.status = 0
        """Status of the response; 0 before its head is complete."""
        self.headers: list[tuple[bytes, bytes]] = []
        self.stale = False
        """Whether a reused connection was lost before the first byte of the response."""
        self.lost_by: Exception | None = None
        """Network error that closed the connection, if any."""
        self.protocol_error = ""
        """Why the received bytes were rejected."""
        self._max_bytes = MAX_RESPONSE_BYTES

    @property
    def response_started(self) -> bool:
        """Whether any byte of the response was received."""
        return bool(self.status or self._unread)

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        transport = self._transport
        return (
            self.state is IDLE
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # the response came before the whole request was sent
        )

    def send_request(
        self, head: bytes, body: bytes | None, *, streamed: bool = False, max_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        """Write a request.

        Args:
            head: from :func:`~rollouts.http.request.request_head`.
            body: ``None`` sends no ``Content-Length``.
            streamed: pause reading while more than :data:`HIGH_WATER` bytes of the response are unread.
            max_bytes: limit of a response that is not streamed; the connection of a longer one is closed.
        """
        self.requests += 1
        self.status, self.headers, self._chunks, self._unread = 0, [], [], 0
        self._streamed, self._max_bytes = streamed, max_bytes
        transport = self._transport
        if transport is None:  # closed since it was opened
            self.state = ERROR
            return
        self.state = ACTIVE
        if body is None:
            transport.write(head + b"\r\n")
            return
        head = b"%sContent-Length: %d\r\n\r\n" % (head, len(body))
        if len(body) <= _MAX_JOINED_BODY:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    async def wait_for(self, awaited: int) -> bool:
        """Wait for :data:`HEADERS`, :data:`DATA` or :data:`END_OF_MESSAGE`; ``False`` if it cannot come any more."""
        if awaited == END_OF_MESSAGE and self._streamed:
            self._streamed = False
            self._resume_reading()
        while not self._has(awaited):
            if self.state is ERROR:
                return False
            self._awaited, self._waiter = awaited, self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def body(self) -> bytes:
        """Return the unread part of the body."""
        chunks, self._chunks, self._unread = self._chunks, [], 0
        self._resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        self._close()

    def _close(self) -> None:
        if self.state is ACTIVE:
            self.state = ERROR
        elif self.state is not ERROR:
            self.state = CLOSED
        self._wake()

    def _has(self, awaited: int) -> bool:
        if self.state is not ACTIVE and self.state is not ERROR:
            return True
        return self.status > 0 if awaited == HEADERS else awaited == DATA and bool(self._chunks)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self.state is ERROR or self._has(self._awaited)):
            waiter.set_result(None)

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def _reject(self, reason: str) -> None:
        """Handle bytes that are not part of a valid response."""
        if self.state is ACTIVE:
            self.protocol_error = reason
            self.abort()
        elif self.state is IDLE:
            self.state = MUST_CLOSE

    # -- callbacks of the event loop --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.state is not ACTIVE:  # unsolicited bytes
            self.abort()
            return
        if not self._streamed and self._unread + nbytes > self._max_bytes:
            self._reject(f"the response is longer than the {self._max_bytes} bytes that the request allows")
            return
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except (HttpParserError, HttpParserUpgrade) as error:
            self._reject(f"not an HTTP response: {error}")
        self._unread += nbytes
        if not self.status and self._unread > _MAX_HEAD_BYTES:
            self._reject(f"not an HTTP response: its head is longer than {_MAX_HEAD_BYTES} bytes")
        elif self._streamed and self._unread > HIGH_WATER and self.state is ACTIVE and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # without sending the rest of the request: no response will come

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self.lost_by = None, exc
        if self.state is ACTIVE:
            if exc is None and self._body_ends_at_close():
                self.state = MUST_CLOSE
            else:
                self.stale = self.requests > 1 and not self.response_started
        self._close()
        del self._parser  # it references this connection
        self._on_closed(self)

    def _body_ends_at_close(self) -> bool:
        names = {name.lower(): value.lower() for name, value in self.headers}
        return (
            self.status > 0
            and b"content-length" not in names
            and b"chunked" not in names.get(b"transfer-encoding", b"")
        )

    # -- callbacks of the parser --

    def on_message_begin(self) -> None:
        if self.state is IDLE:  # a second response to one request
            self.state = MUST_CLOSE

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.state is not ACTIVE:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # informational: the final response follows
            self.headers = []
            return
        for name, value in self.headers:
            if name.lower() == b"content-encoding" and value.lower() != b"identity":
                self._reject(f"not an HTTP response: unsupported content encoding: {value.decode(errors='replace')}")
                return
        self.status = status

    def on_body(self, body: bytes) -> None:
        if self.state is ACTIVE:
            self._chunks.append(body)

    def on_message_complete(self) -> None:
        if self.status and self.state is ACTIVE:
            self.state = IDLE if self._parser.should_keep_alive() else MUST_CLOSE
