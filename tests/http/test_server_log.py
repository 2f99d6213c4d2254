"""The log of the servers: nothing of a client that does not speak HTTP, everything of a handler that fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

import anyio
import pytest
from aiohttp import web

from rollouts.http.server_log import server_log

MALFORMED = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\nabcd",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"G\x1b[31mT / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    async def fail(request: web.Request) -> web.Response:
        await request.read()
        raise RuntimeError("the handler failed")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", fail)
    runner = web.AppRunner(app, access_log=None, logger=server_log())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def ask(port: int, request: bytes, *, ends: bool) -> bytes:
    """The answer to a request whose client sends nothing more, or closes its side."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(request)
        if ends:
            await stream.send_eof()
        answer = b""
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                answer += await stream.receive()
        return answer


@pytest.mark.parametrize("request_bytes", MALFORMED)
async def test_a_request_that_is_not_http_is_not_logged(request_bytes: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """It is answered with an error of the client, or the connection is closed."""
    async with serving() as port:
        answer = await ask(port, request_bytes, ends=True)
    assert not answer or answer.split()[1].startswith(b"4")
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_an_error_of_a_handler_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With its traceback."""
    async with serving() as port:
        answer = await ask(port, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", ends=False)
    assert answer.split()[1] == b"500"
    assert "the handler failed" in caplog.text
