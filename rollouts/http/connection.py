"""A connection of HTTP/1.1, for one request after another.

Invariant: an answer belongs to the one request that was written before it, and :attr:`Connection.whole` says whether
all of it is there. A connection on which anything else came, whose request was given up, or that the server ends with
its answer, is never :attr:`~Connection.usable` again.

llhttp reads the answers. No compression is asked for, no upgrade, and nothing is sent before the last answer is whole.
It knows no pool, no deadline, and nothing of what it carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

__all__ = ["HEAD", "SOME", "WHOLE", "Connection"]

HEAD, SOME, WHOLE = range(3)
"""What of an answer is waited for: its status and headers; a further piece of its body; the end of it."""

HIGH_WATER = 1 << 18
"""Bytes that lie there unread when reading from the socket pauses, where the body is taken piece by piece."""

_LONGEST_HEAD = 1 << 18
_TOGETHER = 1 << 16
"""A body up to so many bytes is copied behind its head, for one write; a longer one is written as it is."""


class Connection(asyncio.BufferedProtocol):
    """One connection, made by the event loop.

    Args:
        buffer: where what comes in lies while it is read; all connections of an event loop may share it.
        lost: is told when it has ended.
    """

    def __init__(self, buffer: memoryview, lost: Callable[[Connection], object]) -> None:
        self._buffer, self._lost = buffer, lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        # As forgiving as is usual for clients: folded headers, lines without CR, spaces after the size of a chunk.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._waiter: asyncio.Future[None] | None = None
        self._awaited = WHOLE
        self._keeps = self._given_up = False
        self._parts: list[bytes] = []
        self._held = 0
        self._piecewise = self._paused = False
        self.used = 0
        """Requests that were written."""
        self.idle_since = 0.0
        """When it was last given back, by the clock of its loop."""
        self.begun = False
        """Whether anything of the answer has come."""
        self.status = 0
        """The status of the answer; 0 before its head is there."""
        self.headers: list[tuple[bytes, bytes]] = []
        self.whole = True
        """Whether all of the answer is there, or nothing has been asked."""
        self.ended = False
        """Whether the connection has ended."""
        self.reason: Exception | None = None
        """What ended it, if the network told."""
        self.garbled = ""
        """Why what came is no answer."""

    @property
    def stale(self) -> bool:
        """Whether it ended before anything of an answer came, having been kept from a request before."""
        return self.used > 1 and not self.begun and not self._given_up

    @property
    def usable(self) -> bool:
        """Whether the last answer was whole, and another request may be written."""
        transport = self._transport
        return (
            self._keeps
            and self.whole
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # an answer that did not wait for the request
        )

    def ask(self, head: bytes, body: bytes | None, *, piecewise: bool = False) -> None:
        """Write a request.

        Args:
            head: from :func:`~rollouts.http.request.request_head`.
            body: ``None`` sends no length.
            piecewise: wait with reading from the socket while much of the answer was not taken.
        """
        self.used += 1
        self.begun = self.whole = False
        self.status, self.headers, self._parts, self._held = 0, [], [], 0
        self._piecewise = piecewise
        transport = self._transport
        if transport is None:  # it has ended already
            return
        if body is None:
            transport.write(head + b"\r\n")
            return
        head = b"%sContent-Length: %d\r\n\r\n" % (head, len(body))
        if len(body) <= _TOGETHER:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    async def wait_for(self, awaited: int) -> bool:
        """Wait for :data:`HEAD`, :data:`SOME` or :data:`WHOLE` of the answer; ``False`` if it will not come."""
        if awaited == WHOLE and self._piecewise:
            self._piecewise = False
            self._resume()
        while not self._has(awaited):
            if self.ended:
                return False
            self._awaited, self._waiter = awaited, self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def body(self) -> bytes:
        """What there is of the body."""
        parts, self._parts, self._held = self._parts, [], 0
        self._resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def abort(self) -> None:
        """End it at once; an answer that is under way will not be whole."""
        self._keeps = False
        if self._transport is not None:
            self._transport.abort()
        if not self.whole:
            self._given_up = self.ended = True
            self._wake()

    def _has(self, awaited: int) -> bool:
        if self.whole:
            return True
        return self.status > 0 if awaited == HEAD else awaited == SOME and bool(self._parts)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self.ended or self._has(self._awaited)):
            waiter.set_result(None)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def _garbage(self, why: str) -> None:
        """Nothing that comes from here on is an answer."""
        self._keeps = False
        if not self.whole:
            self.garbled = why
            self.abort()

    # -- what the event loop says --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.whole or self.ended:  # nobody asked
            self.abort()
            return
        self.begun = True
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except (HttpParserError, HttpParserUpgrade) as error:
            self._garbage(str(error))
        self._held += nbytes
        if not self.status and self._held > _LONGEST_HEAD:
            self._garbage(f"its head is longer than {_LONGEST_HEAD} bytes")
        elif self._piecewise and self._held > HIGH_WATER and not self.whole and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # at once, though some of the request may not be sent: no answer will come

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.whole and not self.ended and exc is None and self._ends_with_the_connection():
            self.whole = True
        self._transport, self._keeps, self.ended, self.reason = None, False, True, exc
        del self._parser  # which holds us
        self._wake()
        self._lost(self)

    def _ends_with_the_connection(self) -> bool:
        told = {name.lower(): value.lower() for name, value in self.headers}
        return (
            self.status > 0 and b"content-length" not in told and b"chunked" not in told.get(b"transfer-encoding", b"")
        )

    # -- what the parser says --

    def on_message_begin(self) -> None:
        if self.whole:  # a second answer to one request
            self._keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it stands behind the body
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # there is more to come
            self.headers = []
        elif not self.whole:
            for name, value in self.headers:
                if name.lower() == b"content-encoding" and value.lower() != b"identity":
                    self._garbage(f"its body is encoded, which was not asked for: {value.decode(errors='replace')}")
                    return
            self.status = status
            self._keeps = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if not self.whole:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        if self.status:
            self.whole = True
