"""HTTP/1.1 over one connection: every way to end a body, and everything that is none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from rollouts.inference.http1 import Broken, Connection, NotHttp, Target

OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def said(*answers: Sequence[bytes]) -> AsyncIterator[tuple[Target, list[bytes]]]:
    """A server that says one of these, in pieces, to each request of a connection, and then closes it."""
    heard: list[bytes] = []

    async def serve(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            for pieces in answers:
                heard.append(await stream.receive())
                for piece in pieces:
                    await stream.send(piece)
                    await anyio.lowlevel.checkpoint()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield Target.of(f"http://127.0.0.1:{port}/a/b?c=d"), heard
        tasks.cancel_scope.cancel()


async def asked(target: Target, times: int = 1) -> list[tuple[int, bytes]]:
    connection = await Connection.open(target)
    try:
        return [await connection.exchange("POST", target, {"X": "y"}, (b"ab", b"c")) for _ in range(times)]
    finally:
        connection.close()


BODIES = {
    "length": [OK + b"Content-Length: 5\r\n\r\nhello"],
    "bytes": [bytes([byte]) for byte in OK + b"content-length:5\r\n\r\nhello"],
    "chunks": [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;ext=1\r\nllo\r\n0\r\nTrailer: x\r\n\r\n"],
    "chunks, torn": [OK + b"Transfer-Encoding: Chunked\r\n\r", b"\n5", b"\r\nhel", b"lo", b"\r", b"\n0\r\n", b"\r\n"],
    "to the end": [OK + b"\r\nhel", b"lo"],
    "1.0": [b"HTTP/1.0 200 OK\r\n\r\nhello"],
    "continue": [b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nhello"],
    "no reason": [b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello"],
}


@pytest.mark.parametrize("pieces", BODIES.values(), ids=BODIES.keys())
async def test_a_body_ends_where_it_says(pieces: list[bytes]) -> None:
    """By its length, its chunks, or with the connection, however it is cut on its way."""
    async with said(pieces) as (target, heard):
        assert await asked(target) == [(200, b"hello")]
        (request,) = heard
        assert request.startswith(b"POST /a/b?c=d HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nX: y\r\n" in request
        assert request.endswith(b"Content-Length: 3\r\n\r\nabc")


async def test_a_connection_serves_one_request_after_another() -> None:
    """Where the server keeps it; an answer without a body ends at once."""
    async with said([OK + b"Content-Length: 1\r\n\r\nx"], [b"HTTP/1.1 204 None\r\n\r\n"]) as (target, _):
        assert await asked(target, 2) == [(200, b"x"), (204, b"")]


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 1\r\nConnection: close\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        OK + b"Content-Length: 1\r\n\r\nxHTTP/1.1 200 OK\r\n",
    ],
)
async def test_a_connection_that_is_not_kept_is_not_used_again(answer: bytes) -> None:
    """Because the server says so, or because it says more than it was asked."""
    async with said([answer]) as (target, _):
        connection = await Connection.open(target)
        assert await connection.exchange("GET", target, {}, ()) == (200, b"x")
        assert not connection.usable


@pytest.mark.parametrize(
    ("pieces", "answered"),
    [([], False), ([b"HTTP/1.1 2"], True), ([OK + b"Content-Length: 9\r\n\r\nhello"], True)],
)
async def test_an_early_end_tells_whether_an_answer_had_begun(pieces: list[bytes], answered: bool) -> None:
    """From the first byte on."""
    async with said(pieces) as (target, _):
        with pytest.raises(Broken) as raised:
            await asked(target)
        assert raised.value.answered is answered


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 twohundred OK\r\n\r\n",
        OK + b"Content-Length: many\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        OK + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000,
    ],
)
async def test_what_is_no_answer_is_said(answer: bytes) -> None:
    """And the connection is not used again."""
    async with said([answer]) as (target, _):
        connection = await Connection.open(target)
        with pytest.raises(NotHttp):
            await connection.exchange("GET", target, {}, ())
        assert not connection.usable


async def test_a_large_request_arrives_whole() -> None:
    """In parts, which are not copied."""
    got = bytearray()
    answered = OK + b"Content-Length: 2\r\n\r\nok"

    async def serve(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            while not got.endswith(b"end"):
                got.extend(await stream.receive())
            await stream.send(answered)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    target = Target.of(f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        connection = await Connection.open(target)
        parts = (b"a" * 10, b"b" * 3_000_000, b"end")
        assert await connection.exchange("POST", target, {}, parts) == (200, b"ok")
        assert got.endswith(b"".join(parts))
        connection.close()
        tasks.cancel_scope.cancel()


def test_a_url_is_read() -> None:
    """Host, port, path, and who asks."""
    target = Target.of("https://me:se%3Acret@[::1]/v1/ü?x=1")
    assert (target.host, target.port, target.secure, target.path) == ("::1", 443, True, b"/v1/%C3%BC?x=1")
    assert target.head == b"Host: [::1]\r\nAuthorization: Basic bWU6c2U6Y3JldA==\r\n"
    assert "cret" not in repr(target)
    for wrong in ("http://", "ftp://x", "http://x:99999", "x"):
        with pytest.raises(ValueError):  # noqa: PT011 - which error is all that it says
            Target.of(wrong)
