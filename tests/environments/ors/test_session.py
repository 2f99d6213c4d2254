"""Sessions with a server that misbehaves: what is resumed, retried, or ends a rollout; keep-alive pings."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from aiohttp import web

from rollouts.agent import run_agent
from rollouts.dtypes import Limits, Message, Prompt, SamplingParams, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.environments.ors import ORSEnvironment, ORSServer
from rollouts.environments.ors.wire import ORSError
from rollouts.errors import ConfigError
from rollouts.renderer import renderer_for
from rollouts.testing.policy import ScriptedPolicy

PROMPT = Prompt("", metadata={"task_spec": {"a": 1}})
CALL = Message("assistant", tool_calls=[ToolCall("t", {}, id="c")])
RESULT = '{"ok": true, "output": {"blocks": [{"type": "text", "text": "fine"}], "reward": 0.5, "finished": false}}'

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(name: str, text: str) -> bytes:
    return f"event: {name}\r\ndata: {text}\r\n\r\n".encode()


class Toy:
    """An ORS server of one tool, whose calls are answered by handlers in turn."""

    def __init__(self) -> None:
        self.requested: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.callers: set[object] = set()
        self.answers: list[Handler] = []
        self.starting = 0
        self.schema: Any = None
        self.pinged = anyio.Event()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.requested.append(path)
        if path == "/ping":
            self.pinged.set()
        if path == "/toy/task_tools":
            return web.json_response({"tools": [{"name": "t", "description": "", "input_schema": self.schema}]})
        if path == "/toy/prompt":
            if self.starting:
                self.starting -= 1
                headers = {"X-Backend-State": "starting", "Retry-After": "0"}
                return web.json_response({"detail": "starting"}, status=503, headers=headers)
            return web.json_response([{"type": "text", "text": "go"}])
        if path == "/toy/call":
            assert request.transport is not None
            self.callers.add(request.transport.get_extra_info("peername"))
            self.bodies.append(msgspec.json.decode(await request.read()))
            return await self.answers.pop(0)(request)
        return web.json_response({})


async def streamed(request: web.Request, *parts: bytes, cut: bool = False) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    if cut:
        assert request.transport is not None
        request.transport.abort()
    return response


def stream_of(*parts: bytes, cut: bool = False) -> Handler:
    return lambda request: streamed(request, *parts, cut=cut)


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def refuses(status: int, headers: dict[str, str] | None = None) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"detail": "not so"}, status=status, headers=headers)

    return answer


@pytest.fixture
async def toy() -> AsyncIterator[Toy]:
    toy = Toy()
    toy.url = await toy.start()  # type: ignore[attr-defined]
    yield toy
    await toy.runner.cleanup()


@pytest.fixture
async def server(toy: Toy) -> AsyncIterator[ORSServer]:
    server = ORSServer(toy.url, environment="toy", ping_seconds=0.05)  # type: ignore[attr-defined]
    yield server
    await server.aclose()


@pytest.fixture
async def started(server: ORSServer) -> AsyncIterator[ORSEnvironment]:
    environment = ORSEnvironment(server)
    await environment.start(PROMPT)
    yield environment
    await environment.close()


DONE = stream_of(event("task_id", "n1"), event("end", RESULT))


async def test_a_stream_that_breaks_is_resumed_by_its_task_id(toy: Toy, started: ORSEnvironment) -> None:
    """The call is not sent again; parts of the result that arrived before are not duplicated."""
    toy.answers = [
        stream_of(event("task_id", "n1"), event("chunk", RESULT[:20]), cut=True),
        stream_of(event("task_id", "n1"), cut=True),
        stream_of(event("task_id", "n1"), b": ping\r\n\r\n", event("chunk", RESULT[:9]), event("end", RESULT[9:])),
    ]
    result = await started.step(CALL)
    assert (result.messages[0].content, result.reward) == ("fine", (0.5,))
    assert [body.get("task_id") for body in toy.bodies] == [None, "n1", "n1"]


async def test_calls_share_a_connection_however_late_their_streams_end(toy: Toy, started: ORSEnvironment) -> None:
    """A connection that is not read to the end cannot be reused, and a new one costs more than a call."""

    async def ends_late(request: web.Request) -> web.StreamResponse:
        response = await streamed(request, event("end", RESULT))
        for _ in range(50):  # the client has read the result by then
            await anyio.lowlevel.checkpoint()
        await response.write(event("chunk", "late"))
        return response

    toy.answers = [ends_late] * 3
    assert [(await started.step(CALL)).reward for _ in range(3)] == [(0.5,)] * 3
    assert len(toy.callers) == 1


async def test_a_stream_that_does_not_end_after_its_result_is_left(toy: Toy, started: ORSEnvironment) -> None:
    """The call needs the result only."""
    left = anyio.Event()

    async def stays(request: web.Request) -> web.StreamResponse:
        response = await streamed(request, event("end", RESULT))
        try:
            await anyio.sleep_forever()
        finally:
            left.set()
        return response

    toy.answers = [stays]
    assert (await started.step(CALL)).reward == (0.5,)
    with anyio.fail_after(5):
        await left.wait()


async def test_a_call_that_may_have_arrived_is_not_sent_again(toy: Toy, started: ORSEnvironment) -> None:
    """It is not known whether the call ran; this is an error."""
    toy.answers = [reset, DONE]
    with pytest.raises(ORSError, match=r"tool 't': .* connection broke before the response"):
        await started.step(CALL)
    assert len(toy.bodies) == 1


@pytest.mark.parametrize("status", [500, 502])
async def test_a_refused_call_is_not_sent_again(toy: Toy, started: ORSEnvironment, status: int) -> None:
    """A proxy may have forwarded the call."""
    toy.answers = [refuses(status), DONE]
    with pytest.raises(ORSError, match=f"status {status}: not so"):
        await started.step(CALL)


async def test_a_call_that_a_starting_server_turned_away_is_sent_again(toy: Toy, started: ORSEnvironment) -> None:
    """This status means that the call did not run."""
    toy.answers = [refuses(503, {"X-Backend-State": "starting", "Retry-After": "0"})] * 6 + [DONE]
    assert (await started.step(CALL)).reward == (0.5,)


async def test_a_server_that_forgot_a_call_ends_the_rollout(toy: Toy, started: ORSEnvironment) -> None:
    """The server's error is in the message."""
    toy.answers = [stream_of(event("task_id", "n1"), cut=True), stream_of(event("error", "unknown task_id"))]
    with pytest.raises(ORSError, match="tool 't': unknown task_id"):
        await started.step(CALL)


async def test_an_environment_that_is_starting_is_waited_for(toy: Toy, server: ORSServer) -> None:
    """For longer than other failures are retried."""
    toy.starting = 9
    environment = ORSEnvironment(server)
    assert [message.content for message in await environment.start(PROMPT)] == ["go"]
    await environment.close()
    assert toy.requested.count("/toy/prompt") == 10


async def test_a_session_gives_signs_of_life_while_the_model_thinks(toy: Toy, started: ORSEnvironment) -> None:
    """Until it is closed."""
    with anyio.fail_after(10):
        await toy.pinged.wait()


async def test_a_session_is_deleted_when_its_start_fails(toy: Toy, server: ORSServer) -> None:
    """Closing is enough, and once."""
    toy.schema = ["no", "schema"]
    environment = ORSEnvironment(server)
    with pytest.raises(ORSError):
        await environment.start(PROMPT)
    await environment.close()
    assert toy.requested.count("/delete") == 1


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("text", "input_schema is 'text'"),
        ({"type": "array"}, "has type 'array'"),
        ({"properties": ["a"]}, r"has properties \['a'\]"),
        ({"properties": {"a": 5}}, "has a property 'a' that is 5"),
        ({"required": "a"}, "has required 'a'"),
    ],
)
async def test_a_schema_that_is_none_is_named(toy: Toy, server: ORSServer, schema: Any, words: str) -> None:
    """With the tool, and what was expected."""
    toy.schema = schema
    environment = ORSEnvironment(server)
    with pytest.raises(ORSError, match=f"tool 't': .*{words}; expected a JSON schema of an object"):
        await environment.start(PROMPT)
    await environment.close()


async def test_failures_are_the_environments_and_cost_one_rollout(toy: Toy, server: ORSServer) -> None:
    """Through the loop: a dead server at the start, a tool that raises at a step; each has its cause."""
    renderer = renderer_for(str(DEMO_MODEL))
    call = '<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>'
    reply = [*renderer.encode(call).tolist(), renderer.stop_token_ids[0]]
    play = functools.partial(
        run_agent,
        PROMPT,
        renderer=renderer,
        sampling=SamplingParams(max_new_tokens=200),
        limits=Limits(max_turns=3),
    )
    dead = ORSServer("http://127.0.0.1:9", environment="toy")
    trajectory = await play(environment_cls=functools.partial(ORSEnvironment, dead), policy=ScriptedPolicy([reply]))
    await dead.aclose()
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.cause) == ("EnvironmentFailure", "environment_start")
    assert "cannot connect" in trajectory.failure.message
    toy.answers = [DONE, stream_of(event("task_id", "n"), event("error", "boom"))]
    policy = ScriptedPolicy([reply, reply])
    trajectory = await play(environment_cls=functools.partial(ORSEnvironment, server), policy=policy)
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.cause) == ("EnvironmentFailure", "environment_step")
    assert "tool 't': boom" in trajectory.failure.message
    assert trajectory.step_rewards == [0.5]


def test_a_url_that_is_none_is_refused() -> None:
    """When the server is made."""
    with pytest.raises(ConfigError, match=r"ORSServer\.base_url: got 'localhost:8080'; expected a URL"):
        ORSServer("localhost:8080")


async def test_a_prompt_without_a_task_is_refused(server: ORSServer) -> None:
    """With what it has, and what was expected."""
    with pytest.raises(ConfigError, match=r'Prompt\.metadata: got \{\}; expected the key "task_spec"'):
        await ORSEnvironment(server).start(Prompt("What?"))
