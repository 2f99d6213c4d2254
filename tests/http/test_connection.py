"""HTTP/1.1 responses, split at every byte."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from rollouts.http.connection import DATA, END_OF_MESSAGE, HEADERS, HIGH_WATER, Connection, ConnectionState


class FakeTransport(asyncio.Transport):
    """An asyncio transport without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.unsent = 0
        self.aborted = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.written += bytes(data)
        self.writes += 1

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def requested() -> tuple[Connection, FakeTransport]:
    """A connection with one request sent."""
    connection, transport = Connection(memoryview(bytearray(1 << 16)), lambda _: None), FakeTransport()
    connection.connection_made(transport)
    connection.send_request(b"POST / HTTP/1.1\r\n", b"{}")
    return connection, transport


def feed(connection: Connection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def splits(data: bytes) -> list[list[bytes]]:
    """Unsplit, split once at each offset, and byte by byte."""
    once = [[data[:offset], data[offset:]] for offset in range(1, len(data))]
    return [[data], *once, [data[offset : offset + 1] for offset in range(len(data))]]


@attrs.frozen
class Case:
    raw: bytes
    status: int = 200
    body: bytes = b"abc"
    keep_alive: bool = True
    until_close: bool = False
    headers: dict[bytes, bytes] = attrs.field(factory=dict)


OK = b"HTTP/1.1 200 OK\r\n"
RESPONSES = {
    "a length": Case(OK + b"Content-Length: 3\r\n\r\nabc"),
    "no body": Case(OK + b"Content-Length: 0\r\n\r\n", body=b""),
    "chunks": Case(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"),
    "chunk extensions and trailers": Case(
        OK + b"transfer-encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\n000\r\nX-Later: 1\r\n\r\n",
        headers={b"transfer-encoding": b"Chunked"},
    ),
    "chunks with spaces": Case(OK + b"Transfer-Encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n"),
    "body until close": Case(OK + b"\r\nabc", keep_alive=False, until_close=True),
    "body until close, with a header": Case(OK + b"Connection: close\r\n\r\nabc", keep_alive=False, until_close=True),
    "an older version": Case(b"HTTP/1.0 200 OK\r\n\r\nabc", keep_alive=False, until_close=True),
    "an older version with a length": Case(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", keep_alive=False),
    "an older version with keep-alive": Case(
        b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 3\r\n\r\nabc"
    ),
    "another encoding": Case(OK + b"Transfer-Encoding: identity\r\n\r\nabc", keep_alive=False, until_close=True),
    "a close": Case(OK + b"CONTENT-LENGTH:3\r\nconnection: x, CLOSE\r\n\r\nabc", keep_alive=False),
    "not modified": Case(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", status=304, body=b""),
    "no content": Case(b"HTTP/1.1 204 No Content\r\n\r\n", status=204, body=b""),
    "informational responses": Case(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        b"HTTP/1.1 201 Created\r\nContent-Length: 3\r\n\r\nabc",
        status=201,
        headers={b"Content-Length": b"3"},
    ),
    "no reason": Case(b"HTTP/1.1 500\r\nContent-Length: 3\r\n\r\nabc", status=500),
    "folded and odd headers": Case(
        OK + b"X-Folded: one\r\n two\r\nX-Empty:\r\nX-Odd: \xe9\x01 : ;\r\nContent-Length: 3\r\n\r\nabc",
        headers={b"X-Folded": b"one two", b"X-Empty": b"", b"X-Odd": b"\xe9\x01 : ;", b"Content-Length": b"3"},
    ),
    "lines without CR": Case(b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc"),
    "empty lines before": Case(b"\r\n\r\n" + OK + b"Content-Length: 3\r\n\r\nabc"),
}


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_response_is_the_same_for_every_split(name: str) -> None:
    """Status, headers and body; also for a second response on a kept connection."""
    case = RESPONSES[name]
    for pieces in splits(case.raw):
        connection, transport = requested()
        for _ in range(2 if case.keep_alive else 1):
            for piece in pieces:
                assert connection.state is ConnectionState.ACTIVE
                feed(connection, piece)
            if case.until_close:
                connection.connection_lost(None)
            assert await connection.wait_for(END_OF_MESSAGE)
            assert (connection.status, connection.body()) == (case.status, case.body)
            assert not case.headers or dict(connection.headers) == case.headers
            assert (connection.usable, connection.protocol_error) == (case.keep_alive, "")
            connection.send_request(b"POST / HTTP/1.1\r\n", None)
        assert not transport.aborted


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_truncated_response_is_incomplete(name: str) -> None:
    """At every offset, except in a body that lasts until close; a reset completes no body."""
    case = RESPONSES[name]
    for size in range(len(case.raw)):
        for reason in (None, ConnectionResetError()):
            connection, _ = requested()
            if size:
                feed(connection, case.raw[:size])
            connection.connection_lost(reason)
            in_body = size >= len(case.raw) - len(case.body)
            assert await connection.wait_for(END_OF_MESSAGE) is (case.until_close and in_body and reason is None)
            assert (connection.response_started, connection.lost_by) == (size > 0, reason)
            assert not connection.usable


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01 no HTTP \r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x46",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\nHTTP/1.1 200 OK\r\n",
    ],
)
async def test_an_invalid_response_closes_the_connection(raw: bytes) -> None:
    """For every split, with a protocol error."""
    for pieces in splits(raw):
        connection, transport = requested()
        for piece in pieces:
            feed(connection, piece)
        assert not await connection.wait_for(END_OF_MESSAGE)
        assert connection.protocol_error
        assert transport.aborted
        assert not connection.usable


async def test_the_size_of_a_head_is_limited() -> None:
    """A longer one is a protocol error."""
    connection, transport = requested()
    feed(connection, OK + b"X: ")
    for _ in range(10):
        feed(connection, b"a" * (1 << 15))
    assert "longer than" in connection.protocol_error
    assert transport.aborted


@pytest.mark.parametrize("more", [b"H", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb", b"{}", b"\x00"])
async def test_unsolicited_bytes_close_the_connection(more: bytes) -> None:
    """In the same read as the response or in a later one; the response itself stays complete."""
    raw = OK + b"Content-Length: 3\r\n\r\nabc"
    for pieces in ([raw + more], [raw, more]):
        connection, _ = requested()
        for piece in pieces:
            feed(connection, piece)
        assert await connection.wait_for(END_OF_MESSAGE)
        assert (connection.status, connection.body()) == (200, b"abc")
        assert not connection.usable


async def test_a_response_before_the_end_of_the_request_closes_the_connection() -> None:
    """Otherwise the rest of the request would precede the next request."""
    connection, transport = requested()
    transport.unsent = 1
    feed(connection, b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
    assert await connection.wait_for(END_OF_MESSAGE)
    assert connection.status == 413
    assert not connection.usable


async def test_only_a_reused_connection_is_stale() -> None:
    """And only before the first byte of the response, and unless the client aborted it."""
    for requests, started, aborted, stale in [(2, 0, 0, 1), (1, 0, 0, 0), (2, 1, 0, 0), (2, 0, 1, 0)]:
        connection, _ = requested()
        for _ in range(requests - 1):
            feed(connection, OK + b"Content-Length: 0\r\n\r\n")
            connection.send_request(b"POST / HTTP/1.1\r\n", None)
        if started:
            feed(connection, b"H")
        if aborted:
            connection.abort()
        connection.connection_lost(None)
        assert not await connection.wait_for(END_OF_MESSAGE)
        assert connection.stale == bool(stale)


async def test_the_received_part_of_a_broken_response_can_be_read() -> None:
    """Its headers and the received part of its body."""
    connection, _ = requested()
    feed(connection, OK + b"Content-Length: 3\r\n\r\nab")
    connection.connection_lost(ConnectionResetError())
    assert await connection.wait_for(HEADERS)
    assert await connection.wait_for(DATA)
    assert connection.body() == b"ab"
    assert not await connection.wait_for(DATA)


async def test_reading_pauses_above_the_high_water_mark() -> None:
    """For streamed responses only."""
    for streamed in (True, False):
        connection, transport = requested()
        feed(connection, OK + b"Content-Length: 0\r\n\r\n")
        connection.send_request(b"GET / HTTP/1.1\r\n", None, streamed=streamed)
        feed(connection, OK + b"Content-Length: 1000000\r\n\r\n")
        for _ in range(HIGH_WATER // (1 << 16) + 1):
            feed(connection, b"a" * (1 << 16))
        assert transport.reading is not streamed
        connection.body()
        assert transport.reading


@pytest.mark.parametrize(("size", "writes"), [(2, 1), (500_000, 1), (2_000_000, 2)])
async def test_a_request_is_one_write_unless_it_is_very_long(size: int, writes: int) -> None:
    """A body with the ids of a long history is sent with its head; a very long one is not copied."""
    connection, transport = Connection(memoryview(bytearray(1 << 16)), lambda _: None), FakeTransport()
    connection.connection_made(transport)
    connection.send_request(b"POST / HTTP/1.1\r\n", b"x" * size)
    assert transport.written == b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (size, b"x" * size)
    assert transport.writes == writes
