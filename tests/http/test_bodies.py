"""Bodies in memory: bounded together, counted when they arrive, and given back in every case."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from aiohttp import web

from rollouts.errors import ConfigError
from rollouts.http.bodies import Bodies
from rollouts.http.client import HttpClient


@asynccontextmanager
async def served(bodies: Bodies, most: int, keep: anyio.Event) -> AsyncIterator[int]:
    """A server that keeps each body until the event is set; yields its port."""

    async def handle(request: web.Request) -> web.Response:
        body = await bodies.read(request, most)
        await keep.wait()
        bodies.release(len(body))
        return web.Response(text=str(len(body)))

    app = web.Application(client_max_size=0)
    app.router.add_post("/", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    try:
        await web.SockSite(runner, listening).start()
        yield listening.getsockname()[1]
    finally:
        await runner.cleanup()


async def until_held(bodies: Bodies, size: int) -> None:
    with anyio.fail_after(30):
        while bodies.held != size:
            await anyio.lowlevel.checkpoint()


async def test_bodies_are_bounded_together() -> None:
    """Eight clients send a megabyte each, at once, to a server with room for three: five are asked to come again."""
    bodies, keep = Bodies(3 << 20), anyio.Event()
    statuses: list[int] = []
    async with served(bodies, 1 << 20, keep) as port, anyio.create_task_group() as tasks:

        async def send() -> None:
            transport = HttpClient(connect_seconds=5)
            async with transport.open("POST", f"http://127.0.0.1:{port}/", {}, b"x" * (1 << 20)) as response:
                statuses.append(response.status)
                if response.status == 503:
                    assert response.headers["retry-after"] == "1"
                await response.read()
            await transport.aclose()
            if len(statuses) == 5:
                assert bodies.held == bodies.most
                keep.set()

        for _ in range(8):
            tasks.start_soon(send)
    assert sorted(statuses) == [200] * 3 + [503] * 5
    assert (bodies.held, bodies.refused) == (0, 5)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_long_body_is_refused(declared: bool) -> None:
    """By its declared length before it is read, else as soon as it is longer."""
    bodies = Bodies(1 << 20)
    async with served(bodies, 1000, anyio.Event()) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            length = "Content-Length: 1000000" if declared else "Transfer-Encoding: chunked"
            await stream.send(f"POST / HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
            if not declared:
                await stream.send(b"3e9\r\n" + b"x" * 1001 + b"\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 413 ")
        await until_held(bodies, 0)


async def test_a_client_that_stops_sending_gives_its_room_back() -> None:
    """After the time limit with 408, and at once when it closes the connection."""
    bodies = Bodies(1000, seconds=0.2)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"
    async with served(bodies, 1000, anyio.Event()) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(head + b"x" * 800)
            assert (await stream.receive()).startswith(b"HTTP/1.1 408 ")
            assert bodies.held == 0
    bodies = Bodies(1000)
    async with served(bodies, 1000, anyio.Event()) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(head + b"x" * 800)
            await until_held(bodies, 800)
        await until_held(bodies, 0)


def test_the_room_is_checked() -> None:
    """It is a number of bytes."""
    with pytest.raises(ConfigError, match=r"Bodies\(most\): got 0"):
        Bodies(0)
    assert repr(Bodies(1)) == "<Bodies: 0 of 1 bytes, 0 refused>"
