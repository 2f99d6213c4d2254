"""Our client of the Open Reward Standard against the servers of ``openreward`` and ``ors-sdk``, on loopback, no key.

Skipped where they are not installed: ``pip install openreward==0.1.167 ors-sdk==0.1.0``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from rollouts.agent import run_agent
from rollouts.dtypes import Image, Limits, Message, Prompt, SamplingParams, StopReason, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.environments.ors import GroupScore, ORSEnvironment, ORSServer
from rollouts.environments.ors.wire import ORSError
from rollouts.errors import ConfigError
from rollouts.renderer import renderer_for
from rollouts.testing.policy import ScriptedPolicy
from tests.integration.ors_words import LONG
from tests.packages import is_installed

pytestmark = pytest.mark.extra

TOYS = Path(__file__).with_name("ors_toys.py")


def toys(kind: str) -> Iterator[str]:
    package = {"openreward": "openreward", "ors": "ors-sdk"}[kind]
    if not is_installed(package):
        pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "OPENREWARD_DISABLE_UPDATE_CHECK": "1", "PYTHONPATH": str(TOYS.parents[2])}
    process = subprocess.Popen(
        [sys.executable, str(TOYS), kind], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def openreward() -> Iterator[str]:
    yield from toys("openreward")


@pytest.fixture(scope="module")
def ors_sdk() -> Iterator[str]:
    yield from toys("ors")


@pytest.fixture(scope="module", params=["openreward", "ors_sdk"])
def either(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
async def adder(either: str) -> AsyncIterator[ORSServer]:
    server = ORSServer(either, secrets={"openai_api_key": "sk-very-secret"})
    yield server
    await server.aclose()


@pytest.fixture
async def writer(openreward: str) -> AsyncIterator[ORSServer]:
    server = ORSServer(openreward, environment="Writer")
    yield server
    await server.aclose()


def calls(*asked: tuple[str, dict[str, Any]]) -> Message:
    return Message(
        "assistant", tool_calls=[ToolCall(name, given, id=f"c{number}") for number, (name, given) in enumerate(asked)]
    )


ADD, SUBMIT = ("add", {"amount": 5}), ("submit", {})


async def test_tasks_tools_rewards_and_the_end(adder: ORSServer) -> None:
    """Tasks come by description; each call has its reward; ``finished`` ends the episode and its further calls."""
    prompts = await adder.prompts("train")
    assert len(prompts) == 8
    assert prompts[2].metadata["task_spec"] == {"start": 2, "target": 7}
    environment = ORSEnvironment(adder)
    opening = await environment.start(prompts[2])
    assert [(message.role, message.content) for message in opening] == [("user", "Get from 2 to 7.")]
    assert sorted(tool.name for tool in environment.tools) == [
        "add",
        "explode",
        "long",
        "picture",
        "secret",
        "submit",
    ]
    assert next(tool for tool in environment.tools if tool.name == "add").parameters["required"] == ["amount"]
    first = await environment.step(calls(ADD))
    assert (first.messages[0].content, first.reward, first.done) == ("7", (-0.25,), False)
    last = await environment.step(calls(ADD, SUBMIT, ADD))
    assert (last.reward, last.done, len(last.messages)) == ((-0.25, 0.0), True, 2)
    await environment.close()
    await environment.close()


async def test_a_task_by_its_place_in_a_split(adder: ORSServer) -> None:
    """The server looks the task up."""
    environment = ORSEnvironment(adder)
    opening = await environment.start(Prompt("", metadata={"split": "test", "index": 1}))
    assert opening[0].content == "Get from 1 to 6."
    await environment.close()


async def test_a_call_that_is_not_run_is_a_message(adder: ORSServer) -> None:
    """Invalid arguments and an unknown tool are messages to the model, and are counted."""
    environment = ORSEnvironment(adder)
    await environment.start((await adder.prompts("train", limit=1))[0])
    result = await environment.step(calls(("add", {"amount": "many"}), ("fly", {}), ADD))
    assert [message.content.startswith("Error: ") for message in result.messages] == [True, True, False]
    assert (result.done, result.metrics["tool_errors"], result.reward) == (False, 2, (-0.25,))
    await environment.close()


async def test_a_tool_that_raises_ends_the_rollout_and_shows_no_secret(adder: ORSServer) -> None:
    """The error contains the server's text without the secret."""
    environment = ORSEnvironment(adder)
    await environment.start((await adder.prompts("train", limit=1))[0])
    with pytest.raises(ORSError, match=r"tool 'explode': boom, and the key is \*\*\*"):
        await environment.step(calls(("explode", {})))
    assert "sk-very" not in repr(adder) + repr(environment.__dict__)
    await environment.close()


async def test_secrets_arrive(adder: ORSServer) -> None:
    """They are sent in the header, and in the body for servers that do not read the header."""
    environment = ORSEnvironment(adder)
    await environment.start((await adder.prompts("train", limit=1))[0])
    assert "openai_api_key" in (await environment.step(calls(("secret", {})))).messages[0].content
    await environment.close()


async def test_long_results_arrive_whole(adder: ORSServer) -> None:
    """Results are streamed in chunks, some of which begin with spaces."""
    environment = ORSEnvironment(adder)
    await environment.start((await adder.prompts("train", limit=1))[0])
    assert (await environment.step(calls(("long", {})))).messages[0].content == LONG
    await environment.close()


async def test_an_image_becomes_a_text(adder: ORSServer) -> None:
    """A text replaces the images, and a metric counts them."""
    environment = ORSEnvironment(adder)
    await environment.start((await adder.prompts("train", limit=1))[0])
    result = await environment.step(calls(("picture", {})))
    assert result.messages[0].content == "see " + 2 * "(image that cannot be shown here: image/png)"
    assert result.metrics["blocks_not_shown"] == 2
    await environment.close()


async def test_a_model_that_sees_gets_the_image(adder: ORSServer) -> None:
    """It keeps its place; one that cannot be decoded is described and counted."""
    environment = ORSEnvironment(adder, images=True)
    await environment.start((await adder.prompts("train", limit=1))[0])
    result = await environment.step(calls(("picture", {})))
    red = Image.of(PIL.Image.new("RGB", (2, 1), (250, 0, 0)))
    assert result.messages[0].content == ("see ", red, "(image that cannot be shown here: image/png)")
    assert result.metrics["blocks_not_shown"] == 1
    await environment.close()


async def test_a_wrong_split_is_refused_with_those_that_there_are(adder: ORSServer) -> None:
    """The error is raised before any work."""
    with pytest.raises(ConfigError, match="split: got 'dev'; expected one of train, test"):
        await adder.prompts("dev")


async def test_a_reply_without_calls_where_no_tool_takes_it(adder: ORSServer) -> None:
    """A message asks the model to use its tools."""
    environment = ORSEnvironment(adder, nudge="Use a tool.")
    await environment.start((await adder.prompts("train", limit=1))[0])
    result = await environment.step(Message("assistant", "done"))
    assert (result.done, list(result.messages)) == (False, [Message("user", "Use a tool.")])
    await environment.close()


async def test_a_terminal_tool_takes_the_last_words(writer: ORSServer) -> None:
    """The model's tools do not include it; the reply's text is its argument, and the episode ends."""
    (prompt,) = await writer.prompts("train", limit=1)
    environment = ORSEnvironment(writer)
    opening = await environment.start(prompt)
    assert [(message.role, message.content) for message in opening] == [("system", "Be brief."), ("user", "Say a.")]
    assert environment.tools == ()
    result = await environment.step(Message("assistant", "a"))
    assert (result.done, result.reward, environment.finished) == (True, (1.0,), True)
    await environment.close()


async def test_tools_of_a_single_task(writer: ORSServer) -> None:
    """Tools may depend on the task; tasks that cannot be listed are fetched one by one."""
    prompts = await writer.prompts("train")
    assert [prompt.metadata["task_spec"]["word"] for prompt in prompts] == ["a", "b", "c"]
    environment = ORSEnvironment(writer)
    await environment.start(prompts[1])
    assert [tool.name for tool in environment.tools] == ["hint"]
    assert (await environment.step(calls(("hint", {})))).messages[0].content == "b"
    await environment.close()


async def test_a_group_is_scored_by_the_environment(writer: ORSServer) -> None:
    """Each conversation gets one score, in order."""

    class Played:
        def __init__(self, text: str, metadata: Any) -> None:
            self.metadata = metadata
            self.named_images: Mapping[str, Image] = {}
            self.messages = [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": text}]

    (prompt,) = await writer.prompts("train", limit=1)
    score = GroupScore(writer)
    assert await score([Played("aa", prompt.metadata), Played("aaaa", prompt.metadata)]) == [2.0, 4.0]


async def test_an_environment_that_scores_no_groups_says_so(adder: ORSServer) -> None:
    """The error names the environment; no zeros are returned."""
    (prompt,) = await adder.prompts("train", limit=1)
    with pytest.raises(ORSError, match="does not score groups"):
        await GroupScore(adder)([Prompt("", metadata=prompt.metadata)])  # type: ignore[list-item]


async def test_a_session_number_of_the_server(either: str) -> None:
    """With a key, as in the cloud, the server issues session numbers and gets them back."""
    server = ORSServer(either, api_key="any")
    environment = ORSEnvironment(server)
    await environment.start((await server.prompts("train", limit=1))[0])
    assert (await environment.step(calls(ADD))).messages[0].content == "5"
    await environment.close()
    await server.aclose()


async def test_an_agent_plays_it(adder: ORSServer) -> None:
    """The agent loop stores exact tokens and a reward for each call, and runs the last turn's calls on request."""
    renderer = renderer_for(str(DEMO_MODEL))
    (prompt,) = await adder.prompts("train", limit=1)

    def said(text: str) -> list[int]:
        return [*renderer.encode(text).tolist(), renderer.stop_token_ids[0]]

    add = '<tool_call>\n{"name": "add", "arguments": {"amount": 5}}\n</tool_call>'
    submit = '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>'
    trajectory = await run_agent(
        prompt,
        partial(ORSEnvironment, adder),
        ScriptedPolicy([said(add + add), said(submit)]),
        renderer,
        sampling=SamplingParams(max_new_tokens=500),
        limits=Limits(max_turns=2, last_calls="run"),
    )
    assert trajectory.failure is None
    assert trajectory.stop_reason is StopReason.TASK_COMPLETED
    assert trajectory.step_rewards == [-0.25, -0.25, 0.0]
