"""Bytes over HTTP: what an error proves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web

from rollouts.dtypes import without_password
from rollouts.errors import ConfigError
from rollouts.testing.replies import Fault
from rollouts.testing.server import StubServer
from rollouts.transport import Garbled, Lost, Transport, Unsent
from tests.raw_server import Visit, answer, full_backlog, raw_server

BODY = msgspec.json.encode({"input_ids": [1], "rid": "r"})


@pytest.fixture
def transport() -> Transport:
    return Transport(connect_seconds=5.0)


async def test_where_nobody_listens_nothing_was_sent(transport: Transport) -> None:
    """A refused connection proves that there is no server."""
    async with StubServer() as server:
        url = server.url
    with pytest.raises(Unsent, match="cannot connect") as raised:
        await transport.post(url, BODY, {})
    assert raised.value.refused
    await transport.aclose()


async def test_a_name_that_does_not_resolve_proves_nothing_about_the_server(transport: Transport) -> None:
    """Nothing was sent, but whatever runs there runs on."""
    with pytest.raises(Unsent) as raised:
        await transport.post("http://nowhere.invalid", BODY, {})
    assert not raised.value.refused
    await transport.aclose()


@pytest.mark.parametrize(("fault", "where"), [("reset", "before the answer"), ("reset_in_body", "in the middle of")])
async def test_a_broken_connection_is_lost_and_not_stale(transport: Transport, fault: Fault, where: str) -> None:
    """A first use cannot have been closed while it was idle."""
    async with StubServer(faults=[fault]) as server:
        with pytest.raises(Lost, match=where) as raised:
            await transport.post(f"{server.url}/generate", BODY, {})
        assert not raised.value.stale
        await transport.aclose()


async def test_a_kept_connection_that_breaks_is_stale(transport: Transport) -> None:
    """Before the first byte of the answer; after it, it is lost as any other. Fresh ones are never stale."""
    async with StubServer(closes_idle=True) as server:
        url = f"{server.url}/generate"
        await transport.post(url, BODY, {})
        with pytest.raises(Lost) as raised:
            await transport.post(url, BODY, {})
        assert raised.value.stale
        await transport.post(url, BODY, {})
        await transport.post(url, BODY, {}, fresh=True)
        assert len(server.requests) == 3
        await transport.aclose()
    async with StubServer(faults=["none", "reset_in_body"]) as server:
        await transport.post(f"{server.url}/generate", BODY, {})
        with pytest.raises(Lost) as raised:
            await transport.post(f"{server.url}/generate", BODY, {})
        assert not raised.value.stale
        await transport.aclose()


async def test_what_is_no_http_is_garbled(transport: Transport) -> None:
    """It may have the request all the same."""
    async with StubServer(faults=["not_http"]) as server:
        with pytest.raises(Garbled, match="not an HTTP answer"):
            await transport.post(f"{server.url}/generate", BODY, {})
        await transport.aclose()


async def test_a_redirect_is_an_answer(transport: Transport) -> None:
    """Following it would send the key, and the request as another one, to wherever it says."""
    seen: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request.path)
        raise web.HTTPFound("/elsewhere")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    status, _ = await transport.post(f"http://127.0.0.1:{runner.addresses[0][1]}/generate", BODY, {})
    assert (status, seen) == (302, ["/generate"])
    await transport.aclose()
    await runner.cleanup()


@pytest.mark.parametrize("url", ["http://", "http://host:99999999/x"])
async def test_a_url_without_a_host_is_a_mistake(transport: Transport, url: str) -> None:
    """Of the user, not of the network."""
    with pytest.raises(ConfigError, match="base_url"):
        await transport.post(url, BODY, {})
    await transport.aclose()


async def test_connections_are_kept_and_single_ones_are_not(transport: Transport) -> None:
    """One after the other goes over one connection, unless a fresh one is asked for."""
    async with StubServer() as server:
        for fresh in (False, False, False, True, True):
            await transport.post(f"{server.url}/generate", BODY, {}, fresh=fresh)
        assert server.connections == 3
        await transport.aclose()


async def test_what_is_cancelled_leaves_no_connection_to_the_next(transport: Transport) -> None:
    """A late answer never meets another request."""
    async with StubServer(lambda ids, params: ids, faults=["hang", "none"]) as server:
        with anyio.move_on_after(0.05):
            await transport.post(f"{server.url}/generate", BODY, {})
        status, payload = await transport.post(
            f"{server.url}/generate", msgspec.json.encode({"input_ids": [2], "rid": "s"}), {}
        )
        assert (status, msgspec.json.decode(payload)["output_ids"]) == (200, [2])
        await transport.aclose()


async def test_a_close_is_not_the_end(transport: Transport) -> None:
    """The next use opens a pool anew; closing twice is closing."""
    async with StubServer() as server:
        for _ in range(2):
            await transport.post(f"{server.url}/generate", BODY, {})
            await transport.aclose()
            await transport.aclose()
    assert repr(transport) == "<Transport: closed, opened 2 times>"


def test_a_closed_pool_has_closed_its_sockets(transport: Transport) -> None:
    """A loop that runs nothing after the close leaves none open (a warning, which would be an error here)."""

    async def use() -> None:
        async with StubServer() as server:
            await transport.post(f"{server.url}/generate", BODY, {})
            await transport.post(f"{server.url}/generate", BODY, {})
            await anyio.lowlevel.checkpoint()
            held.extend(_sockets(transport))
            await transport.aclose()
            assert all(socket.fileno() == -1 for socket in held)

    held: list[Any] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(use())
    loop.close()
    assert held


def _sockets(transport: Transport) -> list[Any]:
    assert transport._pool is not None
    pool: Any = transport._pool
    return [connection._transport.get_extra_info("socket") for connection in pool._connections]


async def test_a_close_is_not_cut_short(transport: Transport) -> None:
    """Though whoever closes it has been cancelled: every socket is closed, without a warning."""
    async with StubServer() as server:
        with anyio.CancelScope() as scope:
            try:
                await transport.post(f"{server.url}/generate", BODY, {})
                scope.cancel()
                await anyio.sleep_forever()
            finally:
                await transport.aclose()
    assert repr(transport) == "<Transport: closed, opened 1 times>"


async def test_a_pool_belongs_to_one_loop(transport: Transport) -> None:
    """Another loop is told so, instead of hanging on the first one's sockets."""
    async with StubServer() as server:
        await transport.post(f"{server.url}/generate", BODY, {})

        def elsewhere() -> None:
            asyncio.run(transport.post(server.url, BODY, {}))  # type: ignore[arg-type]

        with pytest.raises(ConfigError, match="another event loop"):
            await anyio.to_thread.run_sync(elsewhere)
        await transport.aclose()


def test_a_password_in_a_url_is_not_shown() -> None:
    """Nor is its user."""
    assert without_password("https://me:secret@host:1/x") == "https://host:1/x"


async def test_bodies_up_to_the_end_of_the_connection(transport: Transport) -> None:
    """As servers of old send them; the connection is not taken for a kept one."""

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
async def test_a_server_that_closes_kept_connections_loses_nothing(transport: Transport, end: str) -> None:
    """In 320 calls: each is answered, or was stale and is answered over a fresh connection."""
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
            except Lost as error:
                assert error.stale  # noqa: PT017
                stale += 1
                assert (await transport.post(url, BODY, {}, fresh=True))[0] == 200

    async with raw_server(handle) as port:
        async with anyio.create_task_group() as calls:
            for _ in range(16):
                calls.start_soon(call, f"http://127.0.0.1:{port}/")
        await transport.aclose()
    assert served == 320
    assert stale > 0 or end != "close"


async def test_a_thousand_cancelled_requests_are_a_thousand_ended_connections(transport: Transport) -> None:
    """The server sees each of them end, and none of them meets another request."""
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
            assert await transport.post(url, b"answer", {}, fresh=True) == (200, b"answer")
            assert await transport.post(url, b"answer", {}) == (200, b"answer")
        await transport.aclose()


async def test_a_cancelled_stream_ends_its_connection(transport: Transport) -> None:
    """While its head is waited for, while a piece of it is, and when its context is left too early."""
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
                    await opened.some()
        async with transport.open("GET", url, {}) as opened:
            assert await opened.some() == b"xxxxx"
        await done.wait()
        await transport.aclose()
    assert seen == [0, 1, 2]


async def test_a_stream_is_read_piece_by_piece_and_its_connection_kept(transport: Transport) -> None:
    """Headers have names in any case, the first of several counts; what is left can be read at once."""
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
            while piece := await opened.some():
                pieces.append(piece)
            assert b"".join(pieces) == b"abc"
            assert (opened.status, opened.headers["X-State"], opened.headers.get("Y")) == (200, "one", None)
            assert list(opened.headers) == ["transfer-encoding", "x-state"]
        async with transport.open("POST", url, {}, b"") as opened:
            assert (await opened.some())[:1] == b"a"
            assert (await opened.read())[-1:] in (b"c", b"")
        assert visits == 1
        await transport.aclose()


async def test_a_stream_that_breaks_gives_what_came_before(transport: Transport) -> None:
    """A number to resume it by may be in it."""

    async def handle(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(b"x" * 10)[:-5])

    async with raw_server(handle) as port:
        async with transport.open("GET", f"http://127.0.0.1:{port}/", {}) as opened:
            assert await opened.some() == b"xxxxx"
            with pytest.raises(Lost, match="in the middle of the answer: the server closed it") as raised:
                await opened.some()
        assert not raised.value.stale
        await transport.aclose()


async def test_a_server_is_not_read_faster_than_its_stream_is_taken(transport: Transport) -> None:
    """It has to wait; all of it comes in the end."""
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
            with contextlib.suppress(Lost):
                while piece := await opened.some():
                    got += len(piece)
        await transport.aclose()
    assert sent <= got < total


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 400_000, 1 << 23])
async def test_bodies_of_any_size_go_and_come(transport: Transport, size: int) -> None:
    """Twice over one connection."""
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


async def test_a_refusal_may_come_before_the_request_is_there(transport: Transport) -> None:
    """It is the answer; what is left of the request is not sent, and meets nobody."""
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


async def test_no_error_tells_the_key(transport: Transport) -> None:
    """Neither what is no HTTP, nor what it was raised from; nor the user in a URL."""
    async with StubServer(faults=["not_http", "reset"]) as server:
        key = "hid" + "den"  # a traceback quotes this line
        url = server.url.replace("//", f"//me:{key}@")
        for kind in (Garbled, Lost):
            with pytest.raises(kind) as raised:
                await transport.post(f"{url}/generate", BODY, {"X-Key": key})
            assert key not in "".join(traceback.format_exception(raised.value))
        await transport.aclose()


async def test_a_user_in_a_url_is_who_asks(transport: Transport) -> None:
    """As the server sees it; the same with any case of a header's name."""
    async with StubServer() as server:
        await transport.post(server.url.replace("//", "//me:a%40b@") + "/generate", BODY, {"x-A": "é"})
        arrived = server.requests[0].headers
        await transport.aclose()
    assert arrived["Authorization"] == "Basic bWU6YUBi"
    assert (arrived["x-A"], arrived["Host"]) == ("é", server.url.removeprefix("http://"))
    assert arrived["Accept-Encoding"] == "identity"


async def test_connections_are_no_more_than_requests_at_once(transport: Transport) -> None:
    """However often they come; the one that was used last is taken first."""
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


async def test_idle_connections_do_not_stay_open() -> None:
    """They end by themselves after their time, and none is used after it."""
    ended: list[anyio.Event] = [anyio.Event() for _ in range(3)]
    visits = 0

    async def handle(visit: Visit) -> None:
        nonlocal visits
        mine = ended[visits]
        visits += 1
        await visit.request()
        await visit.say(answer())
        await visit.ended()
        mine.set()

    transport = Transport(connect_seconds=5.0, idle_seconds=0.02)
    async with raw_server(handle) as port:
        for number in range(3):
            await transport.post(f"http://127.0.0.1:{port}/", BODY, {})
            with anyio.fail_after(5):
                await ended[number].wait()
        await transport.aclose()
    assert visits == 3


async def test_each_idle_connection_has_its_time() -> None:
    """Those that were used later end later, though nothing is asked any more."""
    answered, ended = anyio.Event(), [anyio.Event(), anyio.Event()]

    async def handle(visit: Visit) -> None:
        _, body = await visit.request()
        if body == b"1":
            await answered.wait()
        await visit.say(answer())
        await visit.ended()
        ended[int(body)].set()

    transport = Transport(connect_seconds=5.0, idle_seconds=0.1)
    async with raw_server(handle) as port:
        async with anyio.create_task_group() as requests:
            requests.start_soon(transport.post, f"http://127.0.0.1:{port}/", b"1", {})
            await transport.post(f"http://127.0.0.1:{port}/", b"0", {})
            with anyio.move_on_after(0.05):
                await ended[0].wait()
            answered.set()
        with anyio.fail_after(5):
            for each in ended:
                await each.wait()
        await transport.aclose()


async def test_a_server_that_says_no_more_is_not_written_to(transport: Transport) -> None:
    """What is left of the request would wait for ever."""

    async def handle(visit: Visit) -> None:
        await visit.head()
        await visit.no_more()
        await anyio.sleep_forever()

    async with raw_server(handle) as port:
        with anyio.fail_after(5), pytest.raises(Lost, match="before the answer"):
            await transport.post(f"http://127.0.0.1:{port}/", b"x" * (1 << 25), {})
        await transport.aclose()


async def test_what_is_under_way_at_a_close_is_lost(transport: Transport) -> None:
    """It was not stale, and half a body is none, though the server might have ended it so."""
    asked = anyio.Event()

    async def handle(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer())
        await visit.request()
        await visit.say(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        asked.set()
        await visit.ended()

    async def ask(url: str) -> None:
        with pytest.raises(Lost) as raised:
            await transport.post(url, BODY, {})
        assert not raised.value.stale

    async with raw_server(handle) as port:
        url = f"http://127.0.0.1:{port}/"
        await transport.post(url, BODY, {})
        async with anyio.create_task_group() as requests:
            requests.start_soon(ask, url)
            await asked.wait()
            await transport.aclose()


def test_what_a_loop_leaves_open_ends_with_it() -> None:
    """Without a close: idle connections, and one whose answer was under way; a warning would be an error here."""

    async def use() -> None:
        async with StubServer(faults=["none", "none", "hang"]) as server:
            for _ in range(2):
                await transport.post(f"{server.url}/generate", BODY, {})
            with anyio.move_on_after(0.02):
                await transport.post(f"{server.url}/generate", BODY, {})

    transport = Transport(connect_seconds=5.0)
    asyncio.run(use())
    gc.collect()
    assert repr(transport) == "<Transport: closed, opened 1 times>"


async def test_a_connection_is_not_waited_for_longer_than_that() -> None:
    """Nothing was sent; nobody says that nobody listens. Who gives up before that leaves no socket."""
    transport = Transport(connect_seconds=0.05)
    with full_backlog() as port:
        with pytest.raises(Unsent, match=r"cannot connect: TimeoutError: not within 0.05 s") as raised:
            await transport.post(f"http://127.0.0.1:{port}/", BODY, {})
        assert not raised.value.refused
        with anyio.move_on_after(0.01) as scope:
            await transport.post(f"http://127.0.0.1:{port}/", BODY, {})
        assert scope.cancelled_caught
    await transport.aclose()
    gc.collect()
