"""The server of the gateway: routes, keys, streams that wait, clients that go away, errors of every kind."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import aiohttp
import anyio
import attrs
import msgspec
import pytest

from rollouts.dtypes import Message, ToolCall
from rollouts.errors import ConfigError
from rollouts.inference.base import CompletionRequest
from rollouts.programs.gateway.connections import Listener
from rollouts.programs.gateway.guest_names import GuestNames
from rollouts.programs.gateway.server import WIRES, Gateway
from rollouts.programs.gateway.types import ApiError, CallRequest
from rollouts.testing.policy import ScriptedPolicy
from tests.fuzzing import fuzz, mutated_json, odd_values
from tests.programs.gateway.programs import check_laws, replies, session_of
from tests.programs.gateway.scripted import ScriptedSession, data_of, named_events
from tests.programs.gateway.test_wire import BODIES as WIRE_BODIES

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": HI},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": HI},
}
PATHS = [*BODIES]
CHAT, RESPONSES, MESSAGES = PATHS
WIRE_NAMES = {CHAT: "chat", RESPONSES: "responses", MESSAGES: "messages"}
SHORT = {"head_seconds": 0.002, "ping_seconds": 0.002}


@attrs.define
class Client:
    """A client of one session, and its gateway."""

    gateway: Gateway
    session: ScriptedSession
    base: str
    http: aiohttp.ClientSession

    def ask(
        self, path: str, body: Any = None, *, key: str | None = None, base: str | None = None, **options: Any
    ) -> Any:
        """The context of a POST request; the key of the session is sent."""
        key = self.session.key if key is None else key
        headers = {"x-api-key" if path == MESSAGES else "Authorization": key if path == MESSAGES else f"Bearer {key}"}
        options.setdefault("headers", headers if key else {})
        return self.http.post(
            (self.base if base is None else base) + path, json=BODIES[path] if body is None else body, **options
        )

    async def error(self, path: str, body: Any = None, **options: Any) -> tuple[int, dict[str, Any]]:
        """The status and error of a request that is refused in the form of its API."""
        async with self.ask(path, body, **options) as response:
            return response.status, error_in(path, await response.json())


def error_in(path: str, whole: dict[str, Any]) -> dict[str, Any]:
    assert set(whole) == ({"type", "error"} if "messages" in path else {"error"})
    error: dict[str, Any] = whole["error"]
    assert set(error) == ({"type", "message"} if "messages" in path else {"message", "type", "param", "code"})
    return error


@contextlib.asynccontextmanager
async def serving(*script: Any, **options: Any) -> AsyncIterator[Client]:
    session = ScriptedSession(script)
    async with Gateway(**options) as gateway, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as http:
        yield Client(gateway, session, gateway.open(session), http)
    assert "0 sessions, 0 calls" in repr(gateway)


def holding(until: anyio.Event, reply: str = "late") -> Callable[[CallRequest], Awaitable[Message | str]]:
    """A reply that waits for an event."""

    async def step(request: CallRequest) -> str:
        await until.wait()
        return reply

    return step


async def never(request: CallRequest) -> str:
    await anyio.sleep_forever()
    raise AssertionError


# -- routes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_each_api_answers_with_and_without_the_path_of_the_session(path: str) -> None:
    """The key alone names the session; the model has the name of the request; the delivery is recorded."""
    async with serving("one", "two") as client:
        for base, text in ((client.base, "one"), (client.gateway.url, "two")):
            async with client.ask(path, base=base, params={"beta": "true"}) as response:
                whole = await response.json()
                assert (response.status, response.content_type, whole["model"]) == (200, "application/json", "m")
                assert text in msgspec.json.encode(whole).decode()
        await client.session.until(lambda: client.session.received == ["r1", "r2"])
        assert [request.messages for request in client.session.requests] == [(Message("user", "hi"),)] * 2


async def test_the_headers_of_agents_reach_the_session() -> None:
    """Those in which programs name agents and conversations, and no others."""
    async with serving("one", "two") as client:
        named = {"X-Claude-Code-Agent-Id": "a", "x-codex-window-id": "w", "session-id": "s", "x-app": "cli"}
        key = {"x-api-key": client.session.key}
        for headers in ({**key, **named}, key):
            async with client.ask(CHAT, headers=headers) as response:
                assert response.status == 200
        assert client.session.lineages == [
            {"x-claude-code-agent-id": "a", "x-codex-window-id": "w", "session-id": "s"},
            {},
        ]


async def test_tokens_are_counted_without_a_call() -> None:
    """The body is as for a message; the session sees no call."""
    async with serving() as client:
        async with client.http.post(
            f"{client.base}/v1/messages/count_tokens",
            json={"messages": [{"role": "user", "content": "four"}]},
            headers={"x-api-key": client.session.key},
        ) as response:
            assert (response.status, await response.json()) == (200, {"input_tokens": 4})
        assert client.session.requests == []


async def test_the_models_are_one_and_any() -> None:
    """The list has the one name; every other name is a model too, as in requests."""
    async with serving(model="mine") as client:
        headers = {"x-api-key": client.session.key}
        async with client.http.get(f"{client.base}/v1/models", headers=headers) as response:
            whole = await response.json()
        async with client.http.get(f"{client.base}/v1/models/some/other", headers=headers) as response:
            other = await response.json()
    (model,) = whole["data"]
    assert set(model) == {"id", "object", "created", "owned_by"}
    assert (whole["object"], whole["has_more"], whole["first_id"], whole["last_id"]) == ("list", False, "mine", "mine")
    assert (model["id"], other["id"], other["object"]) == ("mine", "some/other", "model")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("GET", "/v1/chat/completions"),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/responses/resp_1"),
        ("GET", ""),
    ],
)
async def test_an_unknown_route_is_counted_and_refused_in_the_form_of_its_api(method: str, path: str) -> None:
    """By the path; never an untyped answer."""
    async with serving() as client:
        headers = {"x-api-key": client.session.key}
        async with client.http.request(method, client.base + path, headers=headers) as response:
            error = error_in(path, await response.json())
        assert (response.status, response.headers["x-should-retry"]) == (404, "false")
        assert error["type"] == ("not_found_error" if "messages" in path else "invalid_request_error")
        assert client.session.counts == {f"unknown_route/{path.lstrip('/')}": 1}


@pytest.mark.parametrize("path", ["", "/", "/api/hello"])
@pytest.mark.parametrize("named", [False, True])
async def test_a_probe_is_answered(path: str, named: bool) -> None:
    """Programs ask by HEAD whether there is a server, without a key; nothing is counted, and GET is not a probe."""
    async with serving() as client:
        base = client.base if named else client.gateway.url
        async with client.http.head(base + path) as response:
            assert (response.status, await response.read()) == (200, b"")
        async with client.http.get(base + path) as response:
            assert response.status == 401
        assert client.session.counts == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_replies_of_one_request(stream: bool) -> None:
    """``n`` of the chat API gives that number of choices; all are delivered."""
    async with serving("one", "two") as client:
        async with client.ask(CHAT, {**BODIES[CHAT], "n": 2, "stream": stream}) as response:
            assert response.status == 200
            data = data_of(await response.read())[:-1] if stream else [await response.json()]
        texts = [""] * 2
        for choice in (choice for each in data for choice in each["choices"]):
            texts[choice["index"]] += choice["delta" if stream else "message"].get("content") or ""
        assert texts == ["one", "two"]
        assert client.session.received == ["r1", "r2"]


async def test_the_names_of_unknown_routes_are_limited() -> None:
    """A program that tries many paths makes no more than a few counts, of a limited length."""
    async with serving() as client:
        for number in range(25):
            url = f"{client.base}/{number}/{'x' * 100}"
            async with client.http.get(url, headers={"x-api-key": client.session.key}) as response:
                assert response.status == 404
        assert len(client.session.counts) == 21
        assert client.session.counts["unknown_route/other"] == 5
        assert max(map(len, client.session.counts)) < 100


async def test_the_names_that_clients_make_are_limited_for_all_sessions_together() -> None:
    """Each session may try other paths: a run has no more names for them, and none has a control character."""
    async with serving(names=GuestNames(most=30)) as client:
        names: set[str] = set()
        for number in range(5):
            session = ScriptedSession([], key=f"key-of-session-{number}")
            base = client.gateway.open(session)
            for path in range(10):
                headers = {"x-api-key": session.key}
                async with client.http.get(f"{base}/%1b[31m{number}-{path}", headers=headers) as response:
                    assert response.status == 404
            names |= session.counts.keys()
            client.gateway.close(session)
        assert len(names) == 31
        assert "unknown_route/other" in names
        assert all(name.isprintable() for name in names)


@pytest.mark.parametrize(
    ("path", "googles"),
    [
        ("/v1beta/models/m:generateContent", True),
        ("/v1beta/models", True),
        ("/v1alpha/models/m:countTokens", True),
        ("/v1beta1/projects/p/models/m:predict", True),
        ("/v1/models/m:streamGenerateContent?alt=sse", True),
        ("/v1/models/m:batchEmbedContents", True),
        ("/v1/models/m:free", False),
        ("/v1/moderations", False),
    ],
)
async def test_a_request_of_googles_api_is_answered_in_its_form(path: str, googles: bool) -> None:
    """Its clients read ``error.status`` and send another header; a colon alone in a name does not make it Google's."""
    async with serving() as client:
        key = {"x-goog-api-key": client.session.key} if googles else {"authorization": f"Bearer {client.session.key}"}
        async with client.http.post(f"{client.base}{path}", json={}, headers=key) as response:
            assert response.status == 404
            error = (await response.json())["error"]
    if googles:
        assert (error["code"], error["status"]) == (404, "NOT_FOUND")
        assert all(api in error["message"] for api in WIRES)
        assert sum(client.session.counts.values()) == 1
    else:
        assert "status" not in error


async def test_a_websocket_is_refused() -> None:
    """The status says that the protocol is not spoken here."""
    async with serving() as client:
        headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Authorization": f"Bearer {client.session.key}"}
        async with client.http.get(f"{client.base}/v1/responses", headers=headers) as response:
            assert response.status == 426
            error_in(RESPONSES, await response.json())


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_only_the_key_of_the_session_opens_it(path: str) -> None:
    """No key, an unknown key, the key of another session on this path: 401, and no session is asked."""
    other = ScriptedSession(["theirs"], key="key-of-another-01")
    async with serving("mine") as client:
        theirs = client.gateway.open(other)
        for key, base in (
            ("", client.base),
            ("unknown-key-00001", client.base),
            (other.key, client.base),
            (client.session.key, theirs),
            (client.session.key, f"{client.gateway.url}/s/{client.session.key}"),
        ):
            status, error = await client.error(path, key=key, base=base)
            assert status == 401
            assert error["type"] == ("authentication_error" if path == MESSAGES else "invalid_request_error")
        both = {"x-api-key": client.session.key, "Authorization": f"Bearer {other.key}"}
        assert (await client.error(path, base=client.gateway.url, headers=both))[0] == 401
        assert client.session.requests == other.requests == []


async def test_a_key_may_be_in_either_header() -> None:
    """Also in both, or with a second key that is of no session."""
    async with serving("a", "b", "c") as client:
        key = client.session.key
        for headers in (
            {"x-api-key": key, "Authorization": f"Bearer {key}"},
            {"x-api-key": key, "Authorization": "Bearer sk-of-another-service"},
            {"Authorization": f"bearer  {key} "},
        ):
            async with client.ask(CHAT, headers=headers) as response:
                assert response.status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_an_ended_session_takes_no_calls(path: str) -> None:
    """409 without a record; a closed one is unknown."""
    async with serving("one") as client:
        client.session.ended = True
        async with client.ask(path) as response:
            assert response.status == 409
            assert response.headers["x-should-retry"] == "false", "SDKs retry this status otherwise"
        client.gateway.close(client.session)
        assert (await client.error(path))[0] == 401
        assert (client.session.requests, client.session.counts) == ([], {})


@pytest.mark.parametrize("key", ["short", "has a space in its middle", "ключ-ключ-ключ-ключ", "line\nend-of-the-key-1"])
async def test_a_key_that_is_no_secret_is_refused(key: str) -> None:
    """It is long, and can be sent in a header."""
    async with Gateway() as gateway:
        with pytest.raises(ConfigError, match=r"key: got \d+ characters; expected at least 16"):
            gateway.open(ScriptedSession(key=key))


async def test_a_key_is_of_one_session() -> None:
    """The second one is refused; after the first is closed, it is free."""
    async with Gateway() as gateway:
        first, second = ScriptedSession(), ScriptedSession()
        base = gateway.open(first)
        assert first.key not in base
        with pytest.raises(ConfigError, match="key: got the key of an open session"):
            gateway.open(second)
        gateway.close(first)
        gateway.close(first)
        assert gateway.open(second, "http://10.0.0.1:8080") == base.replace(gateway.url, "http://10.0.0.1:8080")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("header", [b"x-api-key: key-of-a-test-000\xff", b"Authorization: Bearer \xf0\x9f"])
async def test_a_key_of_any_bytes_is_unknown(path: str, header: bytes) -> None:
    """Also of bytes that are not UTF-8: the answer has the form of the API."""
    async with serving() as client:
        status, whole = await sent_raw(client, path.encode(), header)
        assert (status, client.session.requests) == (401, [])
        error_in(path, whole)


async def sent_raw(client: Client, path: bytes, header: bytes) -> tuple[int, Any]:
    """The status and JSON of the answer to a request of these bytes."""
    request = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b\r\nContent-Length: 2\r\n\r\n{}" % (path, header)
    answer = b""
    async with await anyio.connect_tcp("127.0.0.1", client.gateway.port) as stream:
        await stream.send(request)
        with contextlib.suppress(anyio.EndOfStream):
            while True:
                answer += await stream.receive()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), msgspec.json.decode(body)


# -- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": "\\ud800"}', b"\xff", b"[" * 5000, b"null"])
async def test_a_body_that_is_no_request_is_refused(path: str, body: bytes) -> None:
    """In the form of its API, counted, and without a call."""
    async with serving() as client:
        headers = {"x-api-key": client.session.key}
        async with client.http.post(client.base + path, data=body, headers=headers) as response:
            assert response.status == 400
            assert "expected" in error_in(path, await response.json())["message"]
        assert client.session.requests == []
        assert client.session.counts == {"refused/invalid_request": 1}


@pytest.mark.parametrize("path", PATHS)
async def test_any_body_gets_a_reply_or_a_typed_error(path: str) -> None:
    """Through the server and a session with a policy: an answer, or an error in the form of the API; never a 500."""
    known = [{k: v for k, v in body.items() if k != "previous_response_id"} for body in WIRE_BODIES[WIRE_NAMES[path]]]
    bodies = [json.dumps(BODIES[path]).encode()] * 3
    fuzz(mutated_json([*known, BODIES[path]]), 60, lambda body: bodies.append(json.dumps(body).encode()))
    fuzz(odd_values, 5, lambda body: bodies.append(json.dumps(body).encode()))
    statuses: Counter[int] = Counter()
    async with Gateway() as gateway, aiohttp.ClientSession() as http:
        while bodies:
            session = session_of(ScriptedPolicy(replies()))
            async with session:
                url = gateway.open(session)
                while bodies and not session.ended:
                    data = bodies.pop()
                    async with http.post(url + path, data=data, headers={"x-api-key": session.key}) as response:
                        whole = await response.read()
                        statuses[response.status] += 1
                        assert response.status in (200, 400, 404, 409), (data, whole)
                        if response.status != 200:
                            error_in(path, msgspec.json.decode(whole))
                        elif response.content_type == "text/event-stream":
                            assert named_events(whole)
                        else:
                            assert msgspec.json.decode(whole)["id"]
                gateway.close(session)
            check_laws(session, [] if session.failure else session.branches())
    assert statuses[200] >= 3, "the bodies without a change are answered"


@pytest.mark.parametrize("path", PATHS)
async def test_a_compressed_body_is_refused(path: str) -> None:
    """No SDK sends one, and a few bytes of it can be gigabytes."""
    async with serving() as client:
        headers = {"x-api-key": client.session.key, "Content-Encoding": "gzip", "Content-Type": "application/json"}
        whole = gzip.compress(msgspec.json.encode(BODIES[path]))
        async with client.http.post(client.base + path, data=whole, headers=headers) as response:
            assert response.status == 415
            assert "not compressed" in error_in(path, await response.json())["message"]
        assert (client.session.requests, client.session.counts) == ([], {"refused/media_type": 1})


async def test_a_long_history_is_read() -> None:
    """More than aiohttp takes by default, and more than is read on the event loop."""
    text = "x" * 2_000_000
    async with serving("one") as client:
        body = io.BytesIO(msgspec.json.encode({"messages": [{"role": "user", "content": text}]}))
        headers = {"x-api-key": client.session.key}
        async with client.http.post(client.base + CHAT, data=body, headers=headers) as response:
            assert response.status == 200
        assert client.session.requests[0].messages == (Message("user", text),)


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_over_the_limit_is_refused(path: str) -> None:
    """With the status of its API, and counted."""
    async with serving(max_body=1000) as client:
        status, error = await client.error(path, {**BODIES[path], "user": "x" * 2000})
        assert status == 413
        assert "1000" in error["message"]
        assert client.session.counts == {"refused/too_large": 1}


async def test_a_body_without_a_length_is_refused_at_the_limit_of_its_session() -> None:
    """It is not read further, and a session has its own limit."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"user": "'
        for _ in range(100):
            yield b"x" * 100

    async with serving("one") as client:
        client.gateway.close(client.session)
        client.session.max_body = 1000
        client.gateway.open(client.session)
        headers = {"x-api-key": client.session.key}
        async with client.http.post(client.base + CHAT, data=pieces(), headers=headers) as response:
            assert response.status == 413
        async with client.ask(CHAT) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("max_context", "most"), [(None, 1 << 26), (1 << 10, 1 << 22), (1 << 17, 1 << 25), (1 << 22, 1 << 26)]
)
async def test_the_limit_of_a_body_is_that_of_the_context(max_context: int | None, most: int) -> None:
    """256 bytes for each token of the context, from 4 MiB to 64 MiB."""
    async with session_of(ScriptedPolicy(replies()), max_context=max_context) as session:
        assert session.max_body == most


def begun_body(client: Client, size: int, key: str = "") -> bytes:
    """A request with the first byte of its body."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {key or client.session.key}\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + b"{"


async def test_the_bodies_under_way_of_a_session_are_limited() -> None:
    """A body that would exceed the limit waits for the others of its session, and for no other session."""
    other = ScriptedSession(["theirs"], key="key-of-another-01")
    async with serving("late", max_body=1000) as client:
        client.gateway.open(other)
        statuses: list[int] = []

        async def ask() -> None:
            async with client.ask(CHAT, {**BODIES[CHAT], "user": "x" * 500}) as response:
                statuses.append(response.status)

        async with anyio.create_task_group() as tasks:
            async with await anyio.connect_tcp("127.0.0.1", client.gateway.port) as stream:
                await stream.send(begun_body(client, 600))
                async with client.ask(CHAT, {"messages": []}) as response:  # small: the body before is under way now
                    assert response.status == 400
                tasks.start_soon(ask)
                async with client.ask(
                    CHAT, {**BODIES[CHAT], "user": "x" * 500}, key=other.key, base=client.gateway.url
                ) as response:
                    assert response.status == 200
                assert (statuses, client.session.requests) == ([], [])
        assert statuses == [200]


async def test_a_body_that_does_not_arrive_is_refused() -> None:
    """After a time, which starts with its head; the connection is closed."""
    async with serving(read_seconds=0.05) as client:
        async with await anyio.connect_tcp("127.0.0.1", client.gateway.port) as stream:
            await stream.send(begun_body(client, 600))
            assert b"408 Request Timeout" in await stream.receive()
        assert client.session.counts == {"refused/timeout": 1}


@pytest.mark.parametrize("sent", [b"", b"POST /v1/mess", b"POST / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_head_that_does_not_arrive_ends_its_connection(sent: bytes) -> None:
    """Also the first one, of which nothing came."""
    async with serving(read_seconds=0.05) as client:
        async with await anyio.connect_tcp("127.0.0.1", client.gateway.port) as stream:
            if sent:
                await stream.send(sent)
            with anyio.fail_after(5), pytest.raises(anyio.EndOfStream):
                await stream.receive()


async def test_a_connection_waits_for_its_next_request() -> None:
    """The deadline is for a head that has begun; an idle connection stays, and so does a call without reply."""
    late = anyio.Event()
    async with serving("one", holding(late), read_seconds=0.05) as client:
        async with await anyio.connect_tcp("127.0.0.1", client.gateway.port) as stream:
            body = msgspec.json.encode(BODIES[CHAT])
            request = begun_body(client, len(body)) + body[1:]
            for _ in range(2):
                await stream.send(request)
                async with await anyio.connect_tcp("127.0.0.1", client.gateway.port) as silent:
                    with pytest.raises(anyio.EndOfStream):  # as long as the deadline of a head
                        await silent.receive()
                late.set()
                assert b"200 OK" in await stream.receive()


@pytest.mark.parametrize(
    "sent",
    [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"G\x1b[31m \r\n\r\n"],
)
async def test_what_is_no_http_is_answered_and_not_logged(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Anybody can send it, without a key: it writes nothing on the standard error of the run."""
    async with serving() as client:
        async with await anyio.connect_tcp("127.0.0.1", client.gateway.port) as stream:
            await stream.send(sent)
            answer = await stream.receive()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 400")
    assert "not an HTTP request" in error_in(CHAT, msgspec.json.decode(body))["message"]
    assert caplog.records == []


# -- connections ------------------------------------------------------------------------------------------------------


async def test_of_too_many_connections_idle_ones_of_the_greediest_are_closed() -> None:
    """A client that holds connections open without a key does not keep others from their calls."""
    async with serving("one", "two", connections=8) as client, contextlib.AsyncExitStack() as stack:
        async with client.ask(CHAT) as response:
            assert response.status == 200
        connect = anyio.connect_tcp
        held = [await stack.enter_async_context(await connect("127.0.0.1", client.gateway.port)) for _ in range(20)]
        for stream in held[:12]:
            with anyio.fail_after(5), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        async with client.ask(CHAT) as response:
            assert response.status == 200


async def test_a_session_has_a_part_of_the_connections() -> None:
    """Requests beyond it are answered with 429, which clients try again; another session has a separate part."""
    ready, other = anyio.Event(), ScriptedSession(["theirs"], key="key-of-another-01")
    async with serving(holding(ready), holding(ready), "third", connections=8) as client:
        client.gateway.open(other)
        statuses: list[int] = []

        async def ask() -> None:
            async with client.ask(CHAT) as response:
                statuses.append(response.status)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
            await client.session.until(lambda: len(client.session.requests) == 2)
            async with client.ask(CHAT) as response:
                assert (response.status, response.headers.get("x-should-retry")) == (429, None)
            async with client.ask(CHAT, key=other.key, base=client.gateway.url) as response:
                assert response.status == 200
            ready.set()
        assert statuses == [200, 200]


@pytest.mark.parametrize("end", [Listener.close, Listener.detach])  # asyncio and uvloop end a server by one each
def test_an_ended_listener_keeps_no_descriptor(end: Callable[[Listener], object]) -> None:
    given = socket.create_server(("127.0.0.1", 0))
    listener = Listener(given)
    own, spare = listener.fileno(), listener._spare
    assert spare is not None
    if end(listener) is not None:
        os.close(own)  # it was given up
    assert given.fileno() == listener.fileno() == -1
    for descriptor in (own, spare):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_listener_without_file_descriptors_closes_what_it_cannot_accept() -> None:
    """It says that nothing waits, so that an event loop neither logs an error nor asks at once again."""
    listener = Listener(socket.create_server(("127.0.0.1", 0)))
    client = socket.create_connection(listener.getsockname())
    held = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        while not held or held[-1] < max(held[0], client.fileno()) + 8:
            held.append(os.dup(client.fileno()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1, hard))
        with pytest.raises(BlockingIOError):
            listener.accept()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)
    client.settimeout(5)
    with client, listener:
        assert client.recv(1) == b""
        with socket.create_connection(listener.getsockname()) as again:
            accepted, address = listener.accept()
            with accepted:
                assert address == again.getsockname()


# -- retries ----------------------------------------------------------------------------------------------------------


class Gate:
    """A script whose replies wait for a gate, and are numbered."""

    def __init__(self) -> None:
        self.gate, self.changed, self.begun = anyio.Event(), anyio.Event(), 0

    async def until(self, begun: int) -> None:
        with anyio.fail_after(10):
            while self.begun < begun:
                await self.changed.wait()


class GatedPolicy(ScriptedPolicy):
    """A policy that answers when its gate is open."""

    gate: Gate

    async def complete(self, request: CompletionRequest) -> Any:
        self.gate.begun += 1
        self.gate.changed.set()
        self.gate.changed = anyio.Event()
        await self.gate.gate.wait()
        return await super().complete(request)


@contextlib.asynccontextmanager
async def gated() -> AsyncIterator[tuple[Any, Gate, Callable[..., Awaitable[str]]]]:
    """A session of a gated policy behind a gateway: the session, its gate, and a call that returns the text."""
    policy = GatedPolicy(replies())
    policy.gate = Gate()
    async with session_of(policy) as session, Gateway() as gateway, aiohttp.ClientSession() as http:
        url, key = gateway.open(session) + CHAT, {"x-api-key": session.key}

        async def ask(headers: Mapping[str, str] = MappingProxyType({}), **fields: Any) -> str:
            async with http.post(url, json={**BODIES[CHAT], **fields}, headers={**key, **headers}) as response:
                return str((await response.json())["choices"][0]["message"]["content"])

        yield session, policy.gate, ask
        while any(not call.delivered for call in session.tree.calls):
            await anyio.lowlevel.checkpoint()
        gateway.close(session)
    check_laws(session, session.branches(), policy)


@pytest.mark.parametrize("own", [{}, {"seed": 1}])
async def test_equal_requests_of_connected_clients_are_sampled_each(own: dict[str, int]) -> None:
    """Four votes are four votes, with or without seeds."""
    async with gated() as (session, gate, ask):
        texts: list[str] = []

        async def vote(number: int) -> None:
            texts.append(await ask(**{name: value + number for name, value in own.items()}))

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(vote, number)
            await gate.until(4)
            gate.gate.set()
        assert (len(set(texts)), session.tree.untrained.total()) == (4, 0)


async def test_a_client_that_times_out_and_asks_again_gets_its_generation() -> None:
    """Its first connection is closed: the generation continues, is served once, and is trained once."""
    async with gated() as (session, gate, ask):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await gate.until(1)
            tasks.cancel_scope.cancel()
        texts: list[str] = []

        async def again() -> None:
            texts.append(await ask())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(again)
            while not session.counts["retries_joined"]:
                await anyio.lowlevel.checkpoint()
            gate.gate.set()
        assert (texts, gate.begun, len(session.tree.calls)) == (["reply number 1"], 1, 1)


@pytest.mark.parametrize(("sent", "attempt"), [({}, 0), ("0", 0), ("2", 2), ("x", 0), ("-1", 0), ("9" * 99, 0)])
async def test_the_header_of_a_retry_reaches_the_session(sent: Any, attempt: int) -> None:
    """As the SDKs of OpenAI and Anthropic send it; any other value is ignored."""
    async with serving("one") as client:
        headers = {"x-api-key": client.session.key, **({"x-stainless-retry-count": sent} if sent else {})}
        async with client.ask(CHAT, headers=headers) as response:
            assert response.status == 200
        assert client.session.attempts == [attempt]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_session_knows_the_replies_whose_client_has_gone(stream: bool) -> None:
    """Also after a part of the answer was written; a call without a reply reports nothing."""
    async with serving("x" * 20_000_000, never) as client:
        for _ in range(2):
            body = msgspec.json.encode({**BODIES[CHAT], "stream": stream})
            async with await anyio.connect_tcp("127.0.0.1", client.gateway.port) as connection:
                await connection.send(begun_body(client, len(body)) + body[1:])
                if not client.session.requests:
                    await connection.receive()
                else:
                    await client.session.until(lambda: len(client.session.requests) == 2)
            await client.session.until(lambda: bool(client.session.lost))
        await client.session.until(lambda: client.session.gone == 1)
        assert (client.session.received, client.session.lost) == ([], ["r1"])


# -- arguments that the model writes ----------------------------------------------------------------------------------

_SCHEMA = {"type": "object", "properties": {"at": {}}}
_FUNCTION = {"name": "look", "description": "Looks.", "parameters": _SCHEMA}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": _FUNCTION},
    RESPONSES: {"type": "function", **_FUNCTION},
    MESSAGES: {"name": "look", "description": "Looks.", "input_schema": _SCHEMA},
}
ODD_ARGUMENTS = {
    "an integer of more than 64 bits": '{"at": 123456789012345678901234567890}',
    "half of a pair": '{"at": "\\ud83d"}',
    "nested": '{"at": ' + "[" * 960 + "]" * 960 + "}",
}


def sent_back(path: str, whole: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer as its program sends it back, with what follows it: results of its calls, or a message."""
    if path == CHAT:
        message = whole["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "r"} for one in message.get("tool_calls", [])]
        return [message, *(results or [{"role": "user", "content": "go on"}])]
    if path == RESPONSES:
        ids = [item["call_id"] for item in whole["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": one, "output": "r"} for one in ids]
        return [*whole["output"], *(results or [{"role": "user", "content": "go on"}])]
    ids = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": one, "content": "r"} for one in ids]
    content = results or [{"type": "text", "text": "go on"}]
    return [{"role": "assistant", "content": whole["content"]}, {"role": "user", "content": content}]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("arguments", ODD_ARGUMENTS.values(), ids=ODD_ARGUMENTS)
async def test_a_program_gets_any_arguments_and_goes_on(path: str, arguments: str) -> None:
    """Whatever JSON the model writes: an answer, and the next request continues the kept ids."""
    call = ToolCall("look", raw=f'{{"name": "look", "arguments": {arguments}}}')
    history: list[dict[str, Any]] = list(HI)
    async with session_of(ScriptedPolicy(replies(Message("assistant", "", [call]), "done"))) as session:
        async with Gateway() as gateway, aiohttp.ClientSession() as http:
            url, headers = gateway.open(session) + path, {"x-api-key": session.key}
            for _ in range(2):
                field = "input" if path == RESPONSES else "messages"
                body = {**BODIES[path], "max_tokens": 4000, "tools": [TOOLS[path]], field: history}
                async with http.post(url, data=json.dumps(body), headers=headers) as response:
                    whole = json.loads(await response.read())
                    assert response.status == 200, whole
                history = [*history, *sent_back(path, whole)]
    (branch,) = session.branches()
    assert len(branch.completions) == 2


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_session_is_a_status(path: str, stream: bool) -> None:
    """Also of a stream whose head was not sent yet."""
    async with serving(ApiError("overflow", "", tokens=9, max_context=8)) as client:
        status, error = await client.error(path, {**BODIES[path], "stream": stream})
        assert (status, "9 tokens" in error["message"]) == (400, True)
        assert client.session.failures == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [ZeroDivisionError, ConnectionResetError])
async def test_any_other_error_is_given_to_the_session(path: str, stream: bool, kind: type[Exception]) -> None:
    """The program gets a typed 500 without its text, and may try again; the session fails with it."""
    broken = kind("a secret")
    async with serving(broken, "fine") as client:
        async with client.ask(path, {**BODIES[path], "stream": stream}) as response:
            assert "x-should-retry" not in response.headers
            error = error_in(path, await response.json())
            assert (response.status, error["message"]) == (500, f"the call failed ({kind.__name__})")
        assert client.session.failures == [broken]
        async with client.ask(path) as response:
            assert response.status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_the_head_is_an_event(path: str) -> None:
    """After pings, in the form of its API."""
    late = anyio.Event()

    async def fail(request: CallRequest) -> str:
        await late.wait()
        raise ApiError("server", "broken")

    async with serving(fail, **SHORT) as client, client.ask(path, {**BODIES[path], "stream": True}) as response:
        assert response.status == 200
        late.set()
        sent = named_events(await response.read())
        assert "broken" in str(sent[-1])
        assert client.session.received == []


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_without_delay_has_no_ping(path: str) -> None:
    """The head waits for the reply, and all events come at once."""
    async with serving("Hello.") as client, client.ask(path, {**BODIES[path], "stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        whole = await response.read()
        assert b"Hello." in whole
        assert b"ping" not in whole
        await client.session.until(lambda: client.session.received == ["r1"])


@pytest.mark.parametrize("path", PATHS)
async def test_a_minute_of_silence_is_full_of_pings(path: str) -> None:
    """The twelve pings of 60 s at one in 5 s, here in milliseconds; then the answer, whole."""
    ready = anyio.Event()
    ping = b"event: ping\n" if path == MESSAGES else b": ping\n"
    async with serving(holding(ready), **SHORT) as client:
        async with client.ask(path, {**BODIES[path], "stream": True}) as response:
            pings, whole = 0, b""
            async for line in response.content:
                whole += line
                pings += line == ping
                if pings == 12:
                    ready.set()
        assert pings >= 12
        assert b"late" in whole
        first = next(index for index, name in enumerate(whole.split(b"\n")) if b"late" in name)
        assert ping not in b"\n".join(whole.split(b"\n")[first:]), "no ping inside of the answer"
        sent = data_of(whole)
        assert sent[-1] == "[DONE]" or sent[-1]["type"] in ("response.completed", "message_stop")
        await client.session.until(lambda: client.session.received == ["r1"])


# -- clients that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_call(path: str, stream: bool) -> None:
    """Before and after the head of a stream; nothing counts as delivered, and other calls continue."""
    async with serving(never, "next", **SHORT) as client:
        body = {**BODIES[path], "stream": stream}

        async def leave() -> None:
            async with client.ask(path, body) as response:
                await response.content.readline()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            await client.session.until(lambda: len(client.session.requests) == 1)
            tasks.cancel_scope.cancel()
        await client.session.until(lambda: client.session.gone == 1)
        assert client.session.received == []
        async with client.ask(path) as response:
            assert response.status == 200


async def test_a_client_that_goes_away_while_it_sends_is_no_failure() -> None:
    """Its body has no end; the session is neither asked nor failed."""
    async with serving("next") as client:
        port = int(client.gateway.url.rpartition(":")[2])
        stream = await anyio.connect_tcp("127.0.0.1", port)
        async with stream:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {client.session.key}\r\nContent-Length: 50\r\n\r\n"
            await stream.send(head.encode() + b'{"messages"')
        async with client.ask(CHAT) as response:
            assert response.status == 200
        assert (len(client.session.requests), client.session.failures) == (1, [])


async def test_calls_of_a_session_run_side_by_side() -> None:
    """A call that waits does not hold up the next one."""
    ready = anyio.Event()
    async with serving(holding(ready, "slow"), "fast") as client:
        texts: list[str] = []

        async def ask() -> None:
            async with client.ask(CHAT) as response:
                texts.append((await response.json())["choices"][0]["message"]["content"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await client.session.until(lambda: len(client.session.requests) == 1)
            await ask()
            ready.set()
        assert texts == ["fast", "slow"]


@pytest.mark.parametrize("path", PATHS)
async def test_closing_a_session_cancels_its_calls(path: str) -> None:
    """A call without head gets 409; a stream that has begun is cut, so that no end says that it is whole."""
    async with serving(never, never, head_seconds=0.002, ping_seconds=100.0) as client:
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await client.error(path))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            async with client.ask(path, {**BODIES[path], "stream": True}) as response:
                assert await response.content.readline()
                await client.session.until(lambda: len(client.session.requests) == 2)
                assert "1 sessions, 2 calls" in repr(client.gateway)
                client.gateway.close(client.session)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
        assert statuses == [409]
        assert client.session.gone == 2


# -- listeners --------------------------------------------------------------------------------------------------------


async def test_several_listeners_serve_one_gateway() -> None:
    """A socket made elsewhere serves the same sessions while its context lasts."""
    async with serving("one", "two") as client:
        made = socket.create_server(("127.0.0.1", 0))
        async with client.gateway.listening(made) as url:
            assert url == f"http://127.0.0.1:{made.getsockname()[1]}"
            for base in (url, client.gateway.url):
                async with client.ask(CHAT, base=base) as response:
                    assert response.status == 200
        async with aiohttp.ClientSession() as another:
            with pytest.raises(aiohttp.ClientConnectionError):
                await another.get(f"{url}/v1/models")


async def test_a_gateway_can_serve_a_given_socket() -> None:
    """Instead of an address."""
    made = socket.create_server(("127.0.0.1", 0))
    port = made.getsockname()[1]
    async with serving("one", sock=made) as client, client.ask(CHAT) as response:
        assert (response.status, response.url.port) == (200, port)


async def test_an_address_that_is_in_use_is_refused() -> None:
    """With the address."""
    async with Gateway() as gateway:
        port = int(gateway.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"host:port: got '127.0.0.1:{port}'; expected an address to listen on"):
            async with Gateway(port=port):
                pass


async def test_a_socket_without_address_is_refused() -> None:
    """Programs reach the server by a URL."""
    with socket.socket(socket.AF_UNIX) as made, pytest.raises(ConfigError, match="sock: got 'AF_UNIX'"):
        async with Gateway(sock=made):
            pass
