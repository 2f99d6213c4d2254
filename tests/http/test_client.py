"""Bytes over HTTP: what an error proves."""

from __future__ import annotations

import asyncio
import gc
import traceback
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web

from rollouts.dtypes import without_password
from rollouts.errors import ConfigError
from rollouts.http.client import ConnectFailed, ConnectionLost, HttpClient, ProtocolError
from rollouts.testing.replies import Fault
from rollouts.testing.server import StubServer
from tests.raw_server import Visit, answer, full_backlog, raw_server

BODY = msgspec.json.encode({"input_ids": [1], "rid": "r"})


@pytest.fixture
def transport() -> HttpClient:
    return HttpClient(connect_seconds=5.0)


async def test_where_nobody_listens_nothing_was_sent(transport: HttpClient) -> None:
    """A refused connection proves that there is no server."""
    async with StubServer() as server:
        url = server.url
    with pytest.raises(ConnectFailed, match="cannot connect") as raised:
        await transport.post(url, BODY, {})
    assert raised.value.refused
    await transport.aclose()


async def test_a_name_that_does_not_resolve_proves_nothing_about_the_server(transport: HttpClient) -> None:
    """Nothing was sent, but whatever runs there runs on."""
    with pytest.raises(ConnectFailed) as raised:
        await transport.post("http://nowhere.invalid", BODY, {})
    assert not raised.value.refused
    await transport.aclose()


@pytest.mark.parametrize(("fault", "where"), [("reset", "before the answer"), ("reset_in_body", "in the middle of")])
async def test_a_broken_connection_is_lost_and_not_stale(transport: HttpClient, fault: Fault, where: str) -> None:
    """A first use cannot have been closed while it was idle."""
    async with StubServer(faults=[fault]) as server:
        with pytest.raises(ConnectionLost, match=where) as raised:
            await transport.post(f"{server.url}/generate", BODY, {})
        assert not raised.value.stale
        await transport.aclose()


async def test_a_kept_connection_that_breaks_is_stale(transport: HttpClient) -> None:
    """Before the first byte of the answer; after it, it is lost as any other. Fresh ones are never stale."""
    async with StubServer(closes_idle=True) as server:
        url = f"{server.url}/generate"
        await transport.post(url, BODY, {})
        with pytest.raises(ConnectionLost) as raised:
            await transport.post(url, BODY, {})
        assert raised.value.stale
        await transport.post(url, BODY, {})
        await transport.post(url, BODY, {}, fresh=True)
        assert len(server.requests) == 3
        await transport.aclose()
    async with StubServer(faults=["none", "reset_in_body"]) as server:
        await transport.post(f"{server.url}/generate", BODY, {})
        with pytest.raises(ConnectionLost) as raised:
            await transport.post(f"{server.url}/generate", BODY, {})
        assert not raised.value.stale
        await transport.aclose()


async def test_what_is_no_http_is_garbled(transport: HttpClient) -> None:
    """It may have the request all the same."""
    async with StubServer(faults=["not_http"]) as server:
        with pytest.raises(ProtocolError, match="not an HTTP answer"):
            await transport.post(f"{server.url}/generate", BODY, {})
        await transport.aclose()


async def test_a_redirect_is_an_answer(transport: HttpClient) -> None:
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
async def test_a_url_without_a_host_is_a_mistake(transport: HttpClient, url: str) -> None:
    """Of the user, not of the network."""
    with pytest.raises(ConfigError, match="base_url"):
        await transport.post(url, BODY, {})
    await transport.aclose()


async def test_connections_are_kept_and_single_ones_are_not(transport: HttpClient) -> None:
    """One after the other goes over one connection, unless a fresh one is asked for."""
    async with StubServer() as server:
        for fresh in (False, False, False, True, True):
            await transport.post(f"{server.url}/generate", BODY, {}, fresh=fresh)
        assert server.connections == 3
        await transport.aclose()


async def test_what_is_cancelled_leaves_no_connection_to_the_next(transport: HttpClient) -> None:
    """A late answer never meets another request."""
    async with StubServer(lambda ids, params: ids, faults=["hang", "none"]) as server:
        with anyio.move_on_after(0.05):
            await transport.post(f"{server.url}/generate", BODY, {})
        status, payload = await transport.post(
            f"{server.url}/generate", msgspec.json.encode({"input_ids": [2], "rid": "s"}), {}
        )
        assert (status, msgspec.json.decode(payload)["output_ids"]) == (200, [2])
        await transport.aclose()


async def test_a_close_is_not_the_end(transport: HttpClient) -> None:
    """The next use opens a pool anew; closing twice is closing."""
    async with StubServer() as server:
        for _ in range(2):
            await transport.post(f"{server.url}/generate", BODY, {})
            await transport.aclose()
            await transport.aclose()
    assert repr(transport) == "<Transport: closed, opened 2 times>"


def test_a_closed_pool_has_closed_its_sockets(transport: HttpClient) -> None:
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


def _sockets(transport: HttpClient) -> list[Any]:
    assert transport._pool is not None
    pool: Any = transport._pool
    return [connection._transport.get_extra_info("socket") for connection in pool._connections]


async def test_a_close_is_not_cut_short(transport: HttpClient) -> None:
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


async def test_a_pool_belongs_to_one_loop(transport: HttpClient) -> None:
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


async def test_no_error_tells_the_key(transport: HttpClient) -> None:
    """Neither what is no HTTP, nor what it was raised from; nor the user in a URL."""
    async with StubServer(faults=["not_http", "reset"]) as server:
        key = "hid" + "den"  # a traceback quotes this line
        url = server.url.replace("//", f"//me:{key}@")
        for kind in (ProtocolError, ConnectionLost):
            with pytest.raises(kind) as raised:
                await transport.post(f"{url}/generate", BODY, {"X-Key": key})
            assert key not in "".join(traceback.format_exception(raised.value))
        await transport.aclose()


async def test_a_user_in_a_url_is_who_asks(transport: HttpClient) -> None:
    """As the server sees it; the same with any case of a header's name."""
    async with StubServer() as server:
        await transport.post(server.url.replace("//", "//me:a%40b@") + "/generate", BODY, {"x-A": "é"})
        arrived = server.requests[0].headers
        await transport.aclose()
    assert arrived["Authorization"] == "Basic bWU6YUBi"
    assert (arrived["x-A"], arrived["Host"]) == ("é", server.url.removeprefix("http://"))
    assert arrived["Accept-Encoding"] == "identity"


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

    transport = HttpClient(connect_seconds=5.0, idle_seconds=0.02)
    async with raw_server(handle) as port:
        for number in range(3):
            await transport.post(f"http://127.0.0.1:{port}/", BODY, {})
            with anyio.fail_after(5):
                await ended[number].wait()
        await transport.aclose()
    assert visits == 3


async def test_a_connection_for_one_request_is_not_kept(transport: HttpClient) -> None:
    """Though the server would; it is told so, and the connection ends with the answer."""
    heads: list[bytes] = []
    ended = anyio.Event()

    async def handle(visit: Visit) -> None:
        heads.append((await visit.request())[0])
        await visit.say(answer())
        await visit.ended()
        ended.set()

    async with raw_server(handle) as port:
        await transport.post(f"http://127.0.0.1:{port}/", BODY, {}, fresh=True)
        with anyio.fail_after(2):
            await ended.wait()
        await transport.aclose()
    assert b"\r\nConnection: close\r\n" in heads[0]


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

    transport = HttpClient(connect_seconds=5.0, idle_seconds=0.1)
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


async def test_of_many_idle_connections_none_stays_open() -> None:
    """More than are ended in one turn of the loop, all given back at about the same time."""
    many, asked, ended = 250, 0, 0
    all_asked, all_ended = anyio.Event(), anyio.Event()

    async def handle(visit: Visit) -> None:
        nonlocal asked, ended
        await visit.request()
        asked += 1
        if asked == many:
            all_asked.set()
        await all_asked.wait()
        await visit.say(answer())
        await visit.ended()
        ended += 1
        if ended == many:
            all_ended.set()

    transport = HttpClient(connect_seconds=5.0, idle_seconds=0.05)
    async with raw_server(handle) as port:
        async with anyio.create_task_group() as requests:
            for _ in range(many):
                requests.start_soon(transport.post, f"http://127.0.0.1:{port}/", b"0", {})
        with anyio.fail_after(20):
            await all_ended.wait()
        await transport.aclose()


async def test_what_is_under_way_at_a_close_is_lost(transport: HttpClient) -> None:
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
        with pytest.raises(ConnectionLost) as raised:
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

    transport = HttpClient(connect_seconds=5.0)
    asyncio.run(use())
    gc.collect()
    assert repr(transport) == "<Transport: closed, opened 1 times>"


async def test_a_connection_is_not_waited_for_longer_than_that() -> None:
    """Nothing was sent; nobody says that nobody listens. Who gives up before that leaves no socket."""
    transport = HttpClient(connect_seconds=0.05)
    with full_backlog() as port:
        with pytest.raises(ConnectFailed, match=r"cannot connect: TimeoutError: not within 0.05 s") as raised:
            await transport.post(f"http://127.0.0.1:{port}/", BODY, {})
        assert not raised.value.refused
        with anyio.move_on_after(0.01) as scope:
            await transport.post(f"http://127.0.0.1:{port}/", BODY, {})
        assert scope.cancelled_caught
    await transport.aclose()
    gc.collect()
