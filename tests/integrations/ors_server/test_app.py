"""Our environments as an ORS server: clients of other SDKs, our own client, and clients that disconnect."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.dtypes import Endpoint, Image, Limits, Message, Prompt, ToolCall
from rollouts.engine.process import READY
from rollouts.environments import SimulatedUser, StepResult
from rollouts.environments.ors import GroupScore, ORSEnvironment, ORSServer
from rollouts.environments.ors.wire import ORSError
from rollouts.errors import ConfigError
from rollouts.http.client import HttpClient
from rollouts.integrations.ors_server.app import environment_server
from rollouts.training import DataBuffer
from rollouts.training.samplers import PoolSampler
from tests.ors_recipe import Talkative, recipe
from tests.packages import is_installed

CLIENTS = Path(__file__).parents[2] / "integration" / "ors_clients.py"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    made = recipe(Endpoint())
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(environment_server(made)) as url:
        yield url


@pytest.fixture
async def server(url: str) -> AsyncIterator[ORSServer]:
    server = ORSServer(url)
    yield server
    await server.aclose()


def calls(*asked: tuple[str, dict[str, Any]]) -> Message:
    return Message(
        "assistant", tool_calls=[ToolCall(name, given, id=f"c{number}") for number, (name, given) in enumerate(asked)]
    )


@pytest.mark.extra
@pytest.mark.parametrize("kind", ["openreward", "ors"])
async def test_real_clients_play_it(kind: str, url: str) -> None:
    """Splits, tasks, tools, rewards, the end, errors and long results, as the clients of two SDKs see them."""
    package = {"openreward": "openreward", "ors": "ors-sdk"}[kind]
    if not is_installed(package):
        pytest.skip(f"{package} is not installed")
    line = [sys.executable, str(CLIENTS), kind, url, "sums"]
    run = functools.partial(subprocess.run, line, capture_output=True, text=True, timeout=120, check=False)
    done = await anyio.to_thread.run_sync(run)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    places = [{"split": "train", "index": index} for index in range(4)]
    tools = ["add", "subtract", "multiply", "divide", "say", "explode"]
    assert (seen["splits"], seen["count"], seen["tasks"]) == (["train"], 4, places)
    assert (seen["range"], seen["task"]) == (places[-2:], places[1])
    assert seen["tools"] == seen["task tools"] == tools
    assert "Invalid split" in seen["wrong split"]
    assert seen["prompt"] == "Use the tools. Finish with: The answer is N.\n\nWhat is 2 + 2?"
    assert seen["calls"][0] == [["5"], None, False]
    assert seen["calls"][1][0][0].startswith("Error: Expected `float`")
    assert "there is no tool 'fly'" in seen["calls"][2][1]
    assert seen["end"] == [1.0, True]
    assert "the episode is over" in seen["after"][0][1]
    assert seen["by index"].endswith("What is 2 + 4?")
    assert seen["long"]
    assert "boom" in seen["broken"][0][1]
    if kind == "openreward":
        assert seen["messages"] == [
            ["system", "Use the tools. Finish with: The answer is N."],
            ["user", "What is 2 + 2?"],
        ]


async def test_our_client_gets_what_a_rollout_would_get(server: ORSServer) -> None:
    """The same messages, and the recipe's reward at the end."""
    prompts = await server.prompts("train")
    environment = ORSEnvironment(server)
    opening = await environment.start(prompts[1])
    assert list(opening) == list(await Talkative().start(Prompt("What is 2 + 3?")))
    assert list(environment.tools) == list(Talkative().tools)
    step = await environment.step(calls(("add", {"a": 2, "b": 3}), ("say", {"words": "so"})))
    assert [message.content for message in step.messages] == ["5", "so"]
    assert (step.done, step.reward) == (False, None)
    last = await environment.step(Message("assistant", "The answer is 5."))
    assert (last.done, last.reward) == (True, (1.0,))
    await environment.close()


async def test_a_user_who_answers_is_no_end(url: str) -> None:
    """After a reply without calls the episode continues if the environment does; other clients read ``finished``."""

    async def user(conversation: Any) -> str | None:
        return "And then?" if len(conversation) < 4 else None

    made = attrs.evolve(recipe(Endpoint()), environment_cls=functools.partial(SimulatedUser, user))
    async with environment_server(made) as other:
        server = ORSServer(other)
        environment = ORSEnvironment(server)
        await environment.start((await server.prompts("train", limit=1))[0])
        first = await environment.step(Message("assistant", "One."))
        assert (first.done, list(first.messages)) == (False, [Message("user", "And then?")])
        last = await environment.step(Message("assistant", "The answer is 4."))
        assert (last.done, last.reward) == (True, (1.0,))
        await environment.close()
        await server.aclose()


async def test_groups_are_scored_by_the_recipe() -> None:
    """A reward for whole groups is the server's ``score_group``."""

    class Played:
        def __init__(self, text: str, metadata: Any) -> None:
            self.metadata = metadata
            self.named_images: Mapping[str, Image] = {}
            self.messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]

    async with environment_server(recipe(Endpoint(), group_rm=True)) as url:
        server = ORSServer(url)
        (prompt,) = await server.prompts("train", limit=1)
        group = [Played("The answer is 4.", prompt.metadata), Played("The answer is 5.", prompt.metadata)]
        assert await GroupScore(server)(group) == [1.0, 0.0]
        await server.aclose()


async def test_a_call_outlives_its_connection(url: str) -> None:
    """Its result is returned for its task id; it has run once."""
    transport = HttpClient(connect_seconds=5)
    headers = {"X-Session-ID": "mine"}
    await transport.post(f"{url}/create", b'{"split": "train", "index": 0}', headers)
    body = b'{"name": "say", "input": {"words": "once"}}'
    async with transport.open("POST", f"{url}/sums/call", headers, body, new_connection=True) as answer:
        task_id = (await answer.read_chunk()).split(b"data: ")[1].split(b"\r")[0]
    again = b'{"name": "say", "input": {}, "task_id": "' + task_id + b'"}'
    status, payload = await transport.post(f"{url}/sums/call", again, headers)
    assert (status, b'"once"' in payload) == (200, True)
    status, payload = await transport.post(f"{url}/sums/call", again.replace(task_id, b"other"), headers)
    assert b"unknown task_id" in payload
    await transport.aclose()


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "words"),
    [
        ("/sums/tasks", b'{"split": "dev"}', {}, 400, b"Invalid split"),
        ("/other/splits", b"", {}, 404, b"unknown environment"),
        ("/create", b'{"split": "train", "index": 9}', {"X-Session-ID": "a"}, 400, b"Invalid index"),
        ("/create", b'{"task_spec": {"index": "x"}}', {"X-Session-ID": "a"}, 400, b"Invalid index"),
        ("/create", b"[]", {"X-Session-ID": "a"}, 422, b"not a JSON object"),
        ("/create", b"{}", {}, 400, b"X-Session-ID"),
        ("/ping", b"", {"X-Session-ID": "unknown"}, 404, b"not found"),
        ("/sums/call", b"{}", {"X-Session-ID": "unknown"}, 404, b"not found"),
        ("/sums/score_group", b"{}", {"X-Session-ID": "unknown"}, 404, b"not found"),
    ],
)
async def test_responses_to_bad_requests_name_the_problem(
    url: str, path: str, body: bytes, headers: dict[str, str], status: int, words: bytes
) -> None:
    """And the server continues."""
    transport = HttpClient(connect_seconds=5)
    if path.endswith("splits"):
        got, payload = await transport.get(url + path, headers)
    else:
        got, payload = await transport.post(url + path, body, headers)
    assert (got, words in payload) == (status, True), payload
    assert (await transport.get(f"{url}/health", {}))[0] == 200
    await transport.aclose()


async def test_sessions_are_closed_once_by_client_or_server() -> None:
    """Also sessions that are still starting."""
    events: list[str] = []

    class Watched(Talkative):
        async def start(self, prompt: Prompt) -> Any:
            if "2 + 5" in str(prompt.prompt):
                events.append("hangs")
                await anyio.sleep_forever()
            return await super().start(prompt)

        async def close(self) -> None:
            events.append("closed")

    async with environment_server(attrs.evolve(recipe(Endpoint()), environment_cls=Watched)) as url:
        server = ORSServer(url)
        prompts = await server.prompts("train")
        first, second = ORSEnvironment(server), ORSEnvironment(server)
        await first.start(prompts[0])
        await first.close()
        await second.start(prompts[1])
        transport = HttpClient(connect_seconds=5)
        await transport.post(f"{url}/create", b'{"split": "train", "index": 3}', {"X-Session-ID": "hanging"})
        await transport.aclose()
        await server.aclose()
        assert events.count("closed") == 1
        while "hangs" not in events:
            await anyio.lowlevel.checkpoint()
    assert events.count("closed") == 3


async def test_an_environment_that_fails_to_start_is_the_sessions_failure() -> None:
    """The client gets its message; the next session is a new one."""

    class Fails(Talkative):
        async def start(self, prompt: Prompt) -> Any:
            raise RuntimeError("no sandbox left")

    async with environment_server(attrs.evolve(recipe(Endpoint()), environment_cls=Fails), limits=Limits()) as url:
        server = ORSServer(url)
        with pytest.raises(ORSError, match=r"status 500: Fails\.start raised RuntimeError: no sandbox left"):
            await ORSEnvironment(server).start((await server.prompts("train"))[0])
        await server.aclose()


async def test_tools_that_cannot_be_read_are_the_sessions_failure() -> None:
    """The attribute is foreign code, too: before, its exception stopped the server with all its sessions."""

    class Fails(Talkative):
        @property
        def tools(self) -> Any:
            raise RuntimeError("no tools for this task")

    async with environment_server(attrs.evolve(recipe(Endpoint()), environment_cls=Fails), limits=Limits()) as url:
        server = ORSServer(url)
        with pytest.raises(ORSError, match=r"status 500: Fails\.tools raised RuntimeError: no tools for this task"):
            await ORSEnvironment(server).start((await server.prompts("train"))[0])
        await server.aclose()


async def test_a_step_without_a_finite_reward_is_the_sessions_failure() -> None:
    """The client gets the field and the value, and no reward."""

    class Fails(Talkative):
        async def step(self, reply: Message) -> StepResult:
            return StepResult(done=True, reward=float("nan"))

    async with environment_server(attrs.evolve(recipe(Endpoint()), environment_cls=Fails), limits=Limits()) as url:
        server = ORSServer(url)
        environment = ORSEnvironment(server)
        await environment.start((await server.prompts("train"))[0])
        with pytest.raises(ORSError, match=r"Fails\.step: StepResult\.reward: got nan; expected a finite number"):
            await environment.step(calls((environment.tools[0].name, {})))
        await environment.close()
        await server.aclose()


async def test_an_address_that_is_taken_is_refused(url: str) -> None:
    """With the address."""
    port = int(url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"host:port: got '127.0.0.1:{port}'; expected an address to listen on"):
        async with environment_server(recipe(Endpoint()), port=port):
            pass


def test_the_command_serves_a_recipe() -> None:
    """``rollouts serve-env`` prints its URL, and ends with its parent's input."""
    line = [sys.executable, "-m", "rollouts", "serve-env", "calculator", "--port", "0"]
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [*line, "--stop-with-stdin"], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    url = next(text for text in process.stdout if READY in text).removeprefix(READY).strip()

    async def first_task() -> str:
        server = ORSServer(url)
        environment = ORSEnvironment(server)
        opening = await environment.start((await server.prompts("train", limit=1))[0])
        await environment.close()
        await server.aclose()
        return opening[0].content

    assert anyio.run(first_task) == "Use the tools. Finish with: The answer is N."
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("task_id", [["a"], {"a": 1}, 7, True])
async def test_25_a_task_id_that_is_no_string_is_refused(url: str, task_id: Any) -> None:
    """It is a 422 that names the field, not an error of the server."""
    transport = HttpClient(connect_seconds=5)
    headers = {"X-Session-ID": f"session {task_id}"}
    await transport.post(f"{url}/create", b'{"split": "train", "index": 0}', headers)
    body = json.dumps({"name": "say", "input": {}, "task_id": task_id}).encode()
    status, payload = await transport.post(f"{url}/sums/call", body, headers)
    assert (status, b"task_id" in payload) == (422, True)
    await transport.post(f"{url}/delete", b"{}", headers)
    await transport.aclose()


async def test_a_recipe_with_a_sampler_is_refused() -> None:
    """The client chooses its tasks by their index."""
    made = recipe(Endpoint())
    buffer = DataBuffer(made.data_buffer.prompts, sampler=PoolSampler())
    with pytest.raises(ConfigError, match=r"sampler: got 'PoolSampler'; expected .uniform.: the client of the server"):
        async with environment_server(attrs.evolve(made, data_buffer=buffer)):
            pass


async def test_28_a_public_address_wants_a_key() -> None:
    """Without one nothing is served; with one, only requests that have it, and the health probe, are answered."""
    with pytest.raises(ConfigError, match=r"host: got '0\.0\.0\.0'; expected 127\.0\.0\.1, or a key"):
        async with environment_server(recipe(Endpoint()), host="0.0.0.0"):
            pass
    async with environment_server(recipe(Endpoint()), host="0.0.0.0", api_key="secret") as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        transport = HttpClient(connect_seconds=5)
        given: list[dict[str, str]] = [{}, {"X-API-Key": "other"}, {"Authorization": "Bearer secret"}]
        asked = [await transport.get(f"{url}/list_environments", headers) for headers in given]
        assert [status for status, _ in asked] == [401, 401, 200]
        assert (await transport.get(f"{url}/health", {}))[0] == 200
        await transport.aclose()
        server = ORSServer(url, api_key="secret")
        assert len(await server.task_specs("train")) > 0
        await server.aclose()


async def test_a_request_that_is_not_http_prints_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is answered with 400."""
    host, port = url.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(b"GET / HTTP/1.1\r\nno colon\r\n\r\n")
        assert (await stream.receive()).split()[1] == b"400"
    assert caplog.records == []
