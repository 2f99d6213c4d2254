"""The client's connections, with servers that stream, refuse, close or stall, and with cancelled requests."""

from __future__ import annotations

import contextlib
import gc
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import anyio
import msgspec
import pytest

from rollouts.http.client import ConnectFailed, ConnectionLost, HttpClient
from rollouts.testing.server import StubServer
from tests.raw_server import Visit, answer, raw_server

BODY = msgspec.json.encode({"input_ids": [1], "rid": "r"})


@pytest.fixture
def transport() -> HttpClient:
    return HttpClient(connect_seconds=5.0)


async def test_bodies_up_to_the_end_of_the_connection(transport: HttpClient) -> None:
    """The body of an HTTP/1.0 server is complete; its connection does not return to the pool."""

    class Old(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(201)
            self.end_headers()
            self.wfile.write(self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Old) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for _ in range(2):
            url = f"http://127.0.0.1:{server.server_port}/"
            assert await transport.post(url, BODY * 10_000, {}) == (201, BODY * 10_000)
        server.shutdown()
        await anyio.to_thread.run_sync(thread.join)
    await transport.aclose()


@pytest.mark.parametrize("end", ["close", "reset", "late close"])
async def test_a_server_that_closes_kept_connections_loses_nothing(transport: HttpClient, end: str) -> None:
    """Each of 320 calls gets a response, on a kept connection or, if that was stale, on a new one."""
    served = 0

    async def handle(visit: Visit) -> None:
        nonlocal served
        await visit.request()
        served += 1
        await visit.say(answer())
        if end == "reset":
            visit.reset()
        elif end == "late close":
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()

    stale = 0

    async def call(url: str) -> None:
        nonlocal stale
        for _ in range(20):
            try:
                assert (await transport.post(url, BODY, {}))[0] == 200
            except ConnectionLost as error:
                assert error.stale  # noqa: PT017
                stale += 1
                assert (await transport.post(url, BODY, {}, new_connection=True))[0] == 200

    async with raw_server(handle) as port:
        async with anyio.create_task_group() as calls:
            for _ in range(16):
                calls.start_soon(call, f"http://127.0.0.1:{port}/")
        await transport.aclose()
    assert served == 320
    assert stale > 0 or end != "close"


async def test_a_thousand_cancelled_requests_are_a_thousand_ended_connections(transport: HttpClient) -> None:
    """The server sees each of them end, and none of them serves another request."""
    asked, ended = 0, 0
    all_asked, all_ended = anyio.Event(), anyio.Event()

    async def handle(visit: Visit) -> None:
        nonlocal asked, ended
        while (await visit.request())[1] == b"answer":
            await visit.say(answer(b"answer"))
        asked += 1
        if asked % 2:
            await visit.say(answer(b"x" * 10)[:-5])
        if asked == 1000:
            all_asked.set()
        await visit.ended()
        ended += 1
        if ended == 1000:
            all_ended.set()

    async with raw_server(handle) as port:
        url = f"http://127.0.0.1:{port}/"
        async with anyio.create_task_group() as requests:
            for _ in range(1000):
                requests.start_soon(transport.post, url, b"hang", {})
            await all_asked.wait()
            requests.cancel_scope.cancel()
        with anyio.fail_after(10):
            await all_ended.wait()
        for _ in range(60):
            assert await transport.post(url, b"answer", {}, new_connection=True) == (200, b"answer")
            assert await transport.post(url, b"answer", {}) == (200, b"answer")
        await transport.aclose()


async def test_a_cancelled_stream_ends_its_connection(transport: HttpClient) -> None:
    """This holds before the head, between two chunks, and if its context is left early."""
    heads = [b"", answer(b"x" * 10)[:-10], answer(b"x" * 10)[:-5]]
    seen: list[int] = []
    done = anyio.Event()

    async def handle(visit: Visit) -> None:
        await visit.request()
        number = len(seen)
        seen.append(number)
        await visit.say(heads[number])
        await visit.ended()
        if number == 2:
            done.set()

    async with raw_server(handle) as port:
        url = f"http://127.0.0.1:{port}/"
        for _ in range(2):
            with anyio.move_on_after(0.05):
                async with transport.open("GET", url, {}) as opened:
                    await opened.read_chunk()
        async with transport.open("GET", url, {}) as opened:
            assert await opened.read_chunk() == b"xxxxx"
        await done.wait()
        await transport.aclose()
    assert seen == [0, 1, 2]


async def test_a_stream_is_read_piece_by_piece_and_its_connection_kept(transport: HttpClient) -> None:
    """Header names are case-insensitive, the first of several counts; the rest of the body can be read at once."""
    visits = 0

    async def handle(visit: Visit) -> None:
        nonlocal visits
        visits += 1
        for _ in range(2):
            await visit.request()
            await visit.say(b"HTTP/1.1 200 OK\r\nx-state: one\r\nX-STATE: two\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in (b"a", b"b", b"c"):
                await visit.say(b"1\r\n%s\r\n" % piece)
            await visit.say(b"0\r\n\r\n")
        await visit.ended()

    async with raw_server(handle) as port:
        url = f"http://127.0.0.1:{port}/"
        async with transport.open("POST", url, {}, b"") as opened:
            pieces = []
            while piece := await opened.read_chunk():
                pieces.append(piece)
            assert b"".join(pieces) == b"abc"
            assert (opened.status, opened.headers["X-State"], opened.headers.get("Y")) == (200, "one", None)
            assert list(opened.headers) == ["transfer-encoding", "x-state"]
        async with transport.open("POST", url, {}, b"") as opened:
            assert (await opened.read_chunk())[:1] == b"a"
            assert (await opened.read())[-1:] in (b"c", b"")
        assert visits == 1
        await transport.aclose()


async def test_a_stream_that_breaks_gives_what_came_before(transport: HttpClient) -> None:
    """The earlier chunks are needed, since they may contain the number to resume by."""

    async def handle(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(b"x" * 10)[:-5])

    async with raw_server(handle) as port:
        async with transport.open("GET", f"http://127.0.0.1:{port}/", {}) as opened:
            assert await opened.read_chunk() == b"xxxxx"
            with pytest.raises(ConnectionLost, match="in the middle of the response: the server closed it") as raised:
                await opened.read_chunk()
        assert not raised.value.stale
        await transport.aclose()


async def test_a_server_is_not_read_faster_than_its_stream_is_taken(transport: HttpClient) -> None:
    """The server has to wait; the whole stream arrives in the end."""
    total, sent = 1 << 26, 0
    stuck = anyio.Event()

    async def handle(visit: Visit) -> None:
        nonlocal sent
        await visit.request()
        await visit.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        piece = b"x" * (1 << 16)
        while sent < total:
            with anyio.move_on_after(0.2) as patience:
                await visit.say(piece)
            if patience.cancelled_caught:
                stuck.set()
                return
            sent += len(piece)

    async with raw_server(handle) as port:
        async with transport.open("GET", f"http://127.0.0.1:{port}/", {}) as opened:
            await stuck.wait()
            got = 0
            with contextlib.suppress(ConnectionLost):
                while piece := await opened.read_chunk():
                    got += len(piece)
        await transport.aclose()
    assert sent <= got < total


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 400_000, 1 << 23])
async def test_bodies_of_any_size_go_and_come(transport: HttpClient, size: int) -> None:
    """Each body goes twice over one connection."""
    visits = 0
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

    async def handle(visit: Visit) -> None:
        nonlocal visits
        visits += 1
        for _ in range(2):
            await visit.say(answer((await visit.request())[1]))
        await visit.ended()

    async with raw_server(handle) as port:
        for _ in range(2):
            assert await transport.post(f"http://127.0.0.1:{port}/", body, {}) == (200, body)
        await transport.aclose()
    assert visits == 1


async def test_a_refusal_may_come_before_the_request_is_there(transport: HttpClient) -> None:
    """It is the response; the rest of the request is not sent."""
    visits = 0

    async def handle(visit: Visit) -> None:
        nonlocal visits
        visits += 1
        await visit.head()
        await visit.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await visit.ended()

    async with raw_server(handle) as port:
        for _ in range(2):
            assert await transport.post(f"http://127.0.0.1:{port}/", b"x" * (1 << 25), {}) == (413, b"big")
        await transport.aclose()
    assert visits == 2


async def test_connections_are_no_more_than_requests_at_once(transport: HttpClient) -> None:
    """This holds for repeated requests; the connection used last is taken first."""
    async with StubServer(lambda ids, params: ids) as server:

        async def ask(number: int) -> None:
            body = {"input_ids": [number], "rid": f"r{number}"}
            _, payload = await transport.post(f"{server.url}/generate", msgspec.json.encode(body), {})
            assert msgspec.json.decode(payload)["output_ids"] == [number]

        for _ in range(5):
            async with anyio.create_task_group() as requests:
                for number in range(20):
                    requests.start_soon(ask, number)
        assert server.connections <= 20
        await transport.aclose()


async def test_a_server_that_says_no_more_is_not_written_to(transport: HttpClient) -> None:
    """The rest of the request would never be read."""

    async def handle(visit: Visit) -> None:
        await visit.head()
        await visit.no_more()
        await anyio.sleep_forever()

    async with raw_server(handle) as port:
        with anyio.fail_after(5), pytest.raises(ConnectionLost, match="before the response"):
            await transport.post(f"http://127.0.0.1:{port}/", b"x" * (1 << 25), {})
        await transport.aclose()


def test_it_runs_on_uvloop() -> None:
    """With uvloop: kept connections, a host name, a cancelled request, and an end without a warning."""
    pytest.importorskip("uvloop")

    async def use() -> None:
        transport = HttpClient(connect_seconds=5.0)
        async with StubServer(faults=["none", "none", "hang"]) as server:
            url = f"{server.url.replace('127.0.0.1', 'localhost')}/generate"
            for _ in range(2):
                assert (await transport.post(url, BODY, {}))[0] == 200
            with anyio.move_on_after(0.02):
                await transport.post(url, BODY, {})
            assert server.connections == 1
        with pytest.raises(ConnectFailed) as raised:
            await transport.post(url, BODY, {})
        assert raised.value.refused

    anyio.run(use, backend_options={"use_uvloop": True})
    gc.collect()
