"""HTTP/1.1 byte by byte: every kind of answer, however it is cut."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from rollouts.http.connection import HEAD, HIGH_WATER, SOME, WHOLE, Connection


class Wire(asyncio.Transport):
    """What the event loop hands to a connection, without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.left = 0
        self.aborted = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return self.left

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def asked() -> tuple[Connection, Wire]:
    """A connection with a request on it."""
    connection, wire = Connection(memoryview(bytearray(1 << 16)), lambda _: None), Wire()
    connection.connection_made(wire)
    connection.ask(b"POST / HTTP/1.1\r\n", b"{}")
    return connection, wire


def feed(connection: Connection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def cuts(data: bytes) -> list[list[bytes]]:
    """At once, cut once at each place, and byte by byte."""
    once = [[data[:place], data[place:]] for place in range(1, len(data))]
    return [[data], *once, [data[place : place + 1] for place in range(len(data))]]


@attrs.frozen
class Case:
    raw: bytes
    status: int = 200
    body: bytes = b"abc"
    keeps: bool = True
    until_end: bool = False
    headers: dict[bytes, bytes] = attrs.field(factory=dict)


OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "a length": Case(OK + b"Content-Length: 3\r\n\r\nabc"),
    "no body": Case(OK + b"Content-Length: 0\r\n\r\n", body=b""),
    "chunks": Case(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"),
    "chunks with words": Case(
        OK + b"transfer-encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\n000\r\nX-Later: 1\r\n\r\n",
        headers={b"transfer-encoding": b"Chunked"},
    ),
    "chunks with spaces": Case(OK + b"Transfer-Encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n"),
    "up to the end": Case(OK + b"\r\nabc", keeps=False, until_end=True),
    "up to the end, as told": Case(OK + b"Connection: close\r\n\r\nabc", keeps=False, until_end=True),
    "an older version": Case(b"HTTP/1.0 200 OK\r\n\r\nabc", keeps=False, until_end=True),
    "an older version with a length": Case(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", keeps=False),
    "an older version that keeps": Case(b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 3\r\n\r\nabc"),
    "another encoding": Case(OK + b"Transfer-Encoding: identity\r\n\r\nabc", keeps=False, until_end=True),
    "a close": Case(OK + b"CONTENT-LENGTH:3\r\nconnection: x, CLOSE\r\n\r\nabc", keeps=False),
    "nothing new": Case(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", status=304, body=b""),
    "nothing": Case(b"HTTP/1.1 204 No Content\r\n\r\n", status=204, body=b""),
    "more to come": Case(
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


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_the_same_however_it_is_cut(name: str) -> None:
    """Status, headers and body; a second one on the same connection, too, where it is kept."""
    case = ANSWERS[name]
    for pieces in cuts(case.raw):
        connection, wire = asked()
        for _ in range(2 if case.keeps else 1):
            for piece in pieces:
                assert not connection.whole
                feed(connection, piece)
            if case.until_end:
                connection.connection_lost(None)
            assert await connection.wait_for(WHOLE)
            assert (connection.status, connection.body()) == (case.status, case.body)
            assert not case.headers or dict(connection.headers) == case.headers
            assert (connection.usable, connection.garbled) == (case.keeps, "")
            connection.ask(b"POST / HTTP/1.1\r\n", None)
        assert not wire.aborted


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_that_is_cut_short_is_not_whole(name: str) -> None:
    """Wherever the connection ends, but for bodies that go on to its end; a reset ends no body."""
    case = ANSWERS[name]
    for place in range(len(case.raw)):
        for reason in (None, ConnectionResetError()):
            connection, _ = asked()
            if place:
                feed(connection, case.raw[:place])
            connection.connection_lost(reason)
            in_body = place >= len(case.raw) - len(case.body)
            assert await connection.wait_for(WHOLE) is (case.until_end and in_body and reason is None)
            assert (connection.begun, connection.reason) == (place > 0, reason)
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
async def test_what_is_no_answer_ends_the_connection(raw: bytes) -> None:
    """And is said to be none, at the same place however it is cut."""
    for pieces in cuts(raw):
        connection, wire = asked()
        for piece in pieces:
            feed(connection, piece)
        assert not await connection.wait_for(WHOLE)
        assert connection.garbled
        assert wire.aborted
        assert not connection.usable


async def test_a_head_without_end_is_no_answer() -> None:
    """It is not kept for ever."""
    connection, wire = asked()
    feed(connection, OK + b"X: ")
    for _ in range(10):
        feed(connection, b"a" * (1 << 15))
    assert "longer than" in connection.garbled
    assert wire.aborted


@pytest.mark.parametrize("more", [b"H", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb", b"{}", b"\x00"])
async def test_what_nobody_asked_for_ends_the_connection(more: bytes) -> None:
    """With the answer or after it; the answer is whole all the same, and nothing else is taken for it."""
    raw = OK + b"Content-Length: 3\r\n\r\nabc"
    for pieces in ([raw + more], [raw, more]):
        connection, _ = asked()
        for piece in pieces:
            feed(connection, piece)
        assert await connection.wait_for(WHOLE)
        assert (connection.status, connection.body()) == (200, b"abc")
        assert not connection.usable


async def test_an_answer_that_did_not_wait_for_the_request_ends_the_connection() -> None:
    """The rest of the request would stand before the next one."""
    connection, wire = asked()
    wire.left = 1
    feed(connection, b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
    assert await connection.wait_for(WHOLE)
    assert connection.status == 413
    assert not connection.usable


async def test_only_a_connection_that_was_kept_is_stale() -> None:
    """And only before the first byte of the answer, and if it was not we who ended it."""
    for requests, begun, by_us, stale in [(2, 0, 0, 1), (1, 0, 0, 0), (2, 1, 0, 0), (2, 0, 1, 0)]:
        connection, _ = asked()
        for _ in range(requests - 1):
            feed(connection, OK + b"Content-Length: 0\r\n\r\n")
            connection.ask(b"POST / HTTP/1.1\r\n", None)
        if begun:
            feed(connection, b"H")
        if by_us:
            connection.abort()
        connection.connection_lost(None)
        assert not await connection.wait_for(WHOLE)
        assert connection.stale == bool(stale)


async def test_what_came_before_the_end_can_be_taken() -> None:
    """The head and the pieces of a body that breaks off."""
    connection, _ = asked()
    feed(connection, OK + b"Content-Length: 3\r\n\r\nab")
    connection.connection_lost(ConnectionResetError())
    assert await connection.wait_for(HEAD)
    assert await connection.wait_for(SOME)
    assert connection.body() == b"ab"
    assert not await connection.wait_for(SOME)


async def test_reading_pauses_while_much_was_not_taken() -> None:
    """Where the body is taken piece by piece; who wants the whole of it gets it without a pause."""
    for piecewise in (True, False):
        connection, wire = asked()
        feed(connection, OK + b"Content-Length: 0\r\n\r\n")
        connection.ask(b"GET / HTTP/1.1\r\n", None, piecewise=piecewise)
        feed(connection, OK + b"Content-Length: 1000000\r\n\r\n")
        for _ in range(HIGH_WATER // (1 << 16) + 1):
            feed(connection, b"a" * (1 << 16))
        assert wire.reading is not piecewise
        connection.body()
        assert wire.reading
