"""HTTP client: errors, connection reuse and closing."""

from __future__ import annotations

import asyncio
import gc
import traceback
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web

from rollouts.errors import ConfigError, without_password
from rollouts.http.client import ConnectFailed, ConnectionLost, HttpClient, ProtocolError
from rollouts.testing.replies import Fault
from rollouts.testing.server import StubServer
from tests.raw_server import Visit, answer, full_backlog, raw_server

BODY = msgspec.json.encode({"input_ids": [1], "rid": "r"})


@pytest.fixture
def transport() -> HttpClient:
    return HttpClient(connect_seconds=5.0)


async def test_a_refused_connection_is_a_connect_failure(transport: HttpClient) -> None:
    """It proves that no server runs there."""
    async with StubServer() as server:
        url = server.url
    with pytest.raises(ConnectFailed, match="cannot connect") as raised:
        await transport.post(url, BODY, {})
    assert raised.value.refused
    await transport.aclose()


async def test_a_name_that_does_not_resolve_proves_nothing_about_the_server(transport: HttpClient) -> None:
    """Nothing was sent, but the server may be running."""
    with pytest.raises(ConnectFailed) as raised:
        await transport.post("http://nowhere.invalid", BODY, {})
    assert not raised.value.refused
    await transport.aclose()


@pytest.mark.parametrize(
    ("fault", "where"), [("reset", "before the response"), ("reset_in_body", "in the middle of the response")]
)
async def test_a_broken_connection_is_lost_and_not_stale(transport: HttpClient, fault: Fault, where: str) -> None:
    """The server cannot have closed a new connection while it was idle."""
    async with StubServer(faults=[fault]) as server:
        with pytest.raises(ConnectionLost, match=where) as raised:
            await transport.post(f"{server.url}/generate", BODY, {})
        assert not raised.value.stale
        await transport.aclose()


async def test_a_kept_connection_that_breaks_is_stale(transport: HttpClient) -> None:
    """Only before the first byte of the response. New connections are never stale."""
    async with StubServer(closes_idle=True) as server:
        url = f"{server.url}/generate"
        await transport.post(url, BODY, {})
        with pytest.raises(ConnectionLost) as raised:
            await transport.post(url, BODY, {})
        assert raised.value.stale
        await transport.post(url, BODY, {})
        await transport.post(url, BODY, {}, new_connection=True)
        assert len(server.requests) == 3
        await transport.aclose()
    async with StubServer(faults=["none", "reset_in_body"]) as server:
        await transport.post(f"{server.url}/generate", BODY, {})
        with pytest.raises(ConnectionLost) as raised:
            await transport.post(f"{server.url}/generate", BODY, {})
        assert not raised.value.stale
        await transport.aclose()


async def test_bytes_that_are_not_http_are_a_protocol_error(transport: HttpClient) -> None:
    """The server may still have received the request."""
    async with StubServer(faults=["not_http"]) as server:
        with pytest.raises(ProtocolError, match="not an HTTP response"):
            await transport.post(f"{server.url}/generate", BODY, {})
        await transport.aclose()


async def test_a_redirect_is_not_followed(transport: HttpClient) -> None:
    """Following it would send the API key to another server."""
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
async def test_an_invalid_url_is_a_config_error(transport: HttpClient, url: str) -> None:
    """Not a network error."""
    with pytest.raises(ConfigError, match="base_url"):
        await transport.post(url, BODY, {})
    await transport.aclose()


async def test_connections_are_reused_unless_fresh(transport: HttpClient) -> None:
    """Sequential requests share one connection; each request with a new connection opens one."""
    async with StubServer() as server:
        for new_connection in (False, False, False, True, True):
            await transport.post(f"{server.url}/generate", BODY, {}, new_connection=new_connection)
        assert server.connections == 3
        await transport.aclose()


async def test_the_connection_of_a_cancelled_request_is_not_reused(transport: HttpClient) -> None:
    """A late response never belongs to another request."""
    async with StubServer(lambda ids, params: ids, faults=["hang", "none"]) as server:
        with anyio.move_on_after(0.05):
            await transport.post(f"{server.url}/generate", BODY, {})
        status, payload = await transport.post(
            f"{server.url}/generate", msgspec.json.encode({"input_ids": [2], "rid": "s"}), {}
        )
        assert (status, msgspec.json.decode(payload)["output_ids"]) == (200, [2])
        await transport.aclose()


async def test_a_closed_client_can_be_used_again(transport: HttpClient) -> None:
    """The next use opens a new pool; closing twice is allowed."""
    async with StubServer() as server:
        for _ in range(2):
            await transport.post(f"{server.url}/generate", BODY, {})
            await transport.aclose()
            await transport.aclose()
    assert repr(transport) == "<HttpClient: closed, opened 2 times>"


def test_a_closed_pool_has_closed_its_sockets(transport: HttpClient) -> None:
    """Even if the loop runs nothing afterwards; an open socket would warn, which is an error in the tests."""

    async def use() -> None:
        async with StubServer() as server:
            await transport.post(f"{server.url}/generate", BODY, {})
            await transport.post(f"{server.url}/generate", BODY, {})
            await anyio.lowlevel.checkpoint()
            sockets.extend(_sockets(transport))
            await transport.aclose()
            assert all(each.fileno() == -1 for each in sockets)

    sockets: list[Any] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(use())
    loop.close()
    assert sockets


def _sockets(transport: HttpClient) -> list[Any]:
    assert transport._pool is not None
    pool: Any = transport._pool
    return [connection._transport.get_extra_info("socket") for connection in pool._connections]


async def test_a_close_is_shielded_from_cancellation(transport: HttpClient) -> None:
    """Every socket is closed, without a warning."""
    async with StubServer() as server:
        with anyio.CancelScope() as scope:
            try:
                await transport.post(f"{server.url}/generate", BODY, {})
                scope.cancel()
                await anyio.sleep_forever()
            finally:
                await transport.aclose()
    assert repr(transport) == "<HttpClient: closed, opened 1 times>"


async def test_a_pool_belongs_to_one_loop(transport: HttpClient) -> None:
    """Use in another loop raises, instead of waiting for sockets of the first one."""
    async with StubServer() as server:
        await transport.post(f"{server.url}/generate", BODY, {})

        def elsewhere() -> None:
            asyncio.run(transport.post(server.url, BODY, {}))  # type: ignore[arg-type]

        with pytest.raises(ConfigError, match="another event loop"):
            await anyio.to_thread.run_sync(elsewhere)
        await transport.aclose()


def test_user_and_password_of_a_url_are_not_shown() -> None:
    """Only scheme, host and path are."""
    assert without_password("https://me:secret@host:1/x") == "https://host:1/x"


async def test_no_error_contains_a_secret(transport: HttpClient) -> None:
    """Neither header values nor the password of the URL, in the error and its causes."""
    async with StubServer(faults=["not_http", "reset"]) as server:
        key = "hid" + "den"  # a traceback quotes this line
        url = server.url.replace("//", f"//me:{key}@")
        for kind in (ProtocolError, ConnectionLost):
            with pytest.raises(kind) as raised:
                await transport.post(f"{url}/generate", BODY, {"X-Key": key})
            assert key not in "".join(traceback.format_exception(raised.value))
        await transport.aclose()


async def test_headers_arrive_at_the_server(transport: HttpClient) -> None:
    """The user of a URL as Authorization; header names in any case; values outside ASCII."""
    async with StubServer() as server:
        await transport.post(server.url.replace("//", "//me:a%40b@") + "/generate", BODY, {"x-A": "é"})
        arrived = server.requests[0].headers
        await transport.aclose()
    assert arrived["Authorization"] == "Basic bWU6YUBi"
    assert (arrived["x-A"], arrived["Host"]) == ("é", server.url.removeprefix("http://"))
    assert arrived["Accept-Encoding"] == "identity"


async def test_idle_connections_do_not_stay_open() -> None:
    """They are closed after ``idle_seconds`` and not used after it."""
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


async def test_a_new_connection_is_closed_after_its_response(transport: HttpClient) -> None:
    """The request contains ``Connection: close``."""
    heads: list[bytes] = []
    ended = anyio.Event()

    async def handle(visit: Visit) -> None:
        heads.append((await visit.request())[0])
        await visit.say(answer())
        await visit.ended()
        ended.set()

    async with raw_server(handle) as port:
        await transport.post(f"http://127.0.0.1:{port}/", BODY, {}, new_connection=True)
        with anyio.fail_after(2):
            await ended.wait()
        await transport.aclose()
    assert b"\r\nConnection: close\r\n" in heads[0]


async def test_each_idle_connection_expires_on_its_own() -> None:
    """Connections that were used later are closed later, without a further request."""
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


async def test_many_idle_connections_are_all_closed() -> None:
    """More than one sweep closes, all released at about the same time."""
    many, received, ended = 250, 0, 0
    all_received, all_ended = anyio.Event(), anyio.Event()

    async def handle(visit: Visit) -> None:
        nonlocal received, ended
        await visit.request()
        received += 1
        if received == many:
            all_received.set()
        await all_received.wait()
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


async def test_a_close_fails_requests_in_flight(transport: HttpClient) -> None:
    """As lost, not as stale; also a body that lasts until close."""
    received = anyio.Event()

    async def handle(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer())
        await visit.request()
        await visit.say(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        received.set()
        await visit.ended()

    async def post(url: str) -> None:
        with pytest.raises(ConnectionLost) as raised:
            await transport.post(url, BODY, {})
        assert not raised.value.stale

    async with raw_server(handle) as port:
        url = f"http://127.0.0.1:{port}/"
        await transport.post(url, BODY, {})
        async with anyio.create_task_group() as requests:
            requests.start_soon(post, url)
            await received.wait()
            await transport.aclose()


def test_the_end_of_a_loop_closes_its_connections() -> None:
    """Idle ones and one whose request was cancelled; a warning would be an error."""

    async def use() -> None:
        async with StubServer(faults=["none", "none", "hang"]) as server:
            for _ in range(2):
                await transport.post(f"{server.url}/generate", BODY, {})
            with anyio.move_on_after(0.02):
                await transport.post(f"{server.url}/generate", BODY, {})

    transport = HttpClient(connect_seconds=5.0)
    asyncio.run(use())
    gc.collect()
    assert repr(transport) == "<HttpClient: closed, opened 1 times>"


async def test_connecting_has_a_deadline() -> None:
    """It is not reported as refused. A cancellation before the deadline leaves no socket."""
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


async def test_an_endless_response_ends_at_its_limit(transport: HttpClient) -> None:
    """Hardening 24: a longer response than requested is not received, and the connection is closed."""
    sent = 0

    async def endless(visit: Visit) -> None:
        nonlocal sent
        await visit.request()
        await visit.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await visit.say(b"10000\r\n" + b" " * 65536 + b"\r\n")
            sent += 65536

    async with raw_server(endless) as port:
        url = f"http://127.0.0.1:{port}/"
        for limit in ({"max_bytes": 1 << 20}, {}):
            with (
                anyio.fail_after(30),
                pytest.raises(ProtocolError, match=r"longer than the \d+ bytes that the request"),
            ):
                await transport.post(url, BODY, {}, **limit)
            assert sent < (limit.get("max_bytes", 1 << 26)) + (8 << 20)
            sent = 0
        with anyio.fail_after(30), pytest.raises(ProtocolError, match="longer than the"):
            async with transport.open("GET", url, {}) as response:
                await response.read()
    await transport.aclose()
