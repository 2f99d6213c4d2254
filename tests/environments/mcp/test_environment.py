"""Tools of real MCP servers: one written with the official SDK, over stdio and streamable HTTP, and a published one."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import PIL.Image
import pytest

from rollouts.agent import run_agent
from rollouts.dtypes import Image, Limits, Message, Prompt, SamplingParams, StopReason, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import StepResult, tool
from rollouts.environments.mcp import McpEnvironment, McpServer
from rollouts.errors import ConfigError
from rollouts.renderer import load_tokenizer, renderer_for
from rollouts.testing.policy import ScriptedPolicy

pytest.importorskip("mcp")

TOOLS = Path(__file__).with_name("mcp_tools.py")


pytestmark = pytest.mark.extra


def stdio(**options: Any) -> McpServer:
    return McpServer(command=(sys.executable, str(TOOLS)), **options)


@pytest.fixture(scope="module")
def server() -> McpServer:
    """With all tools; a session for each episode."""
    return stdio()


@pytest.fixture
def http() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a server over HTTP, and its process."""
    process = subprocess.Popen([sys.executable, str(TOOLS), "--http"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip(), process
    process.kill()
    process.communicate()


async def step(environment: McpEnvironment, *calls: tuple[str, dict[str, Any]]) -> StepResult:
    tool_calls = [ToolCall(name, arguments, id=str(number)) for number, (name, arguments) in enumerate(calls)]
    return await environment.step(Message("assistant", tool_calls=tool_calls))


async def content_of(environment: McpEnvironment, name: str, **arguments: Any) -> str:
    return (await step(environment, (name, arguments))).messages[0].content


# -- what a model gets ------------------------------------------------------------------------------------------------


async def test_the_tools_of_a_server_are_ours_over_stdio() -> None:
    """Names, descriptions and schemas as it lists them; answers in the order of the calls."""
    environment = McpEnvironment(stdio(only=("add", "count")), system_prompt="Be brief.")
    assert [(tool.name, tool.description) for tool in environment.tools] == [
        ("add", "Add two integers."),
        ("count", "How often this session has counted."),
    ]
    assert environment.tools[0].parameters["required"] == ["a", "b"]
    opening = await environment.start(Prompt("Well?"))
    assert [message.role for message in opening] == ["system", "user"]
    result = await step(environment, ("add", {"a": 5, "b": 3}), ("count", {}), ("count", {}))
    assert [(message.tool_call_id, message.content) for message in result.messages] == [
        ("0", "8"),
        ("1", "1"),
        ("2", "2"),
    ]
    await environment.close()


async def test_the_tools_of_a_server_are_ours_over_http(http: tuple[str, subprocess.Popen[str]]) -> None:
    """The same over streamable HTTP."""
    environment = McpEnvironment(McpServer(url=http[0], only=("add",)))
    await environment.start(Prompt("Well?"))
    assert await content_of(environment, "add", a=5, b=3) == "8"
    await environment.close()


async def test_what_cannot_be_shown_is_described_and_counted(server: McpServer) -> None:
    """An image next to text is described; a resource with text is read."""
    environment = McpEnvironment(server)
    await environment.start(Prompt("Well?"))
    shown = await step(environment, ("picture", {}))
    assert shown.messages[0].content == "a red dot\n[an image, image/png, 36 bytes: it cannot be shown here]"
    assert shown.metrics == {"tool_errors": 0, "mcp_blocks_not_shown": 1}
    assert await content_of(environment, "document") == "to be read"
    await environment.close()


async def test_a_model_that_sees_gets_the_images_of_a_tool(server: McpServer) -> None:
    """Images keep their places in the text; an image that cannot be decoded is described and counted."""
    environment = McpEnvironment(server, images=True)
    await environment.start(Prompt("Well?"))
    shown = await step(environment, ("plot", {}), ("picture", {}))
    image = Image.of(PIL.Image.new("RGB", (4, 3), (250, 0, 0)))
    assert shown.messages[0].content == ("a red", "\n", "dot", image, "done")
    assert shown.messages[1].content == "a red dot\n[an image, image/png, 36 bytes: it cannot be shown here]"
    assert shown.metrics == {"tool_errors": 0, "mcp_blocks_not_shown": 1}
    await environment.close()


async def test_errors_of_a_tool_go_to_the_model() -> None:
    """Its exceptions, arguments that do not fit, and a late answer."""
    environment = McpEnvironment(stdio(call_seconds=1.0))
    await environment.start(Prompt("Well?"))
    refused = await step(environment, ("refuse", {}), ("add", {"a": "x"}), ("sleep", {}), ("add", {"a": 1, "b": 1}))
    texts = [message.content for message in refused.messages]
    assert texts[0].startswith("Error: ")
    assert "not today" in texts[0]
    assert texts[1].startswith("Error: ")
    assert texts[2:] == ["Error: no answer within 1 s", "2"]
    assert refused.metrics == {"tool_errors": 3}
    await environment.close()


async def test_an_answer_that_cannot_be_read_costs_its_call(server: McpServer) -> None:
    """The SDK refuses it without a code; the session goes on, with the state that it has."""
    environment = McpEnvironment(server)
    await environment.start(Prompt("Well?"))
    answered = await step(environment, ("count", {}), ("garble", {}), ("count", {}))
    texts = [message.content for message in answered.messages]
    assert (texts[0], texts[2]) == ("1", "2")
    assert texts[1].startswith("Error: 1 validation error for CallToolResult")
    assert answered.metrics == {"tool_errors": 1}
    await environment.close()


async def test_own_tools_are_offered_with_those_of_servers() -> None:
    """A subclass has both."""

    class Both(McpEnvironment):
        @tool
        def shout(self, text: str) -> str:
            """Louder."""
            return text.upper()

    environment = Both(stdio(only=("add",)))
    await environment.start(Prompt("Well?"))
    assert [tool.name for tool in environment.tools] == ["shout", "add"]
    result = await step(environment, ("shout", {"text": "a"}), ("add", {"a": 1, "b": 2}))
    assert [message.content for message in result.messages] == ["A", "3"]
    await environment.close()


# -- sessions ---------------------------------------------------------------------------------------------------------


async def test_each_episode_has_a_session_and_its_process_ends_with_it(server: McpServer) -> None:
    """State is not shared, and nothing is left behind: neither a process nor the thread."""
    first, second = McpEnvironment(server), McpEnvironment(server)
    await first.start(Prompt("Well?"))
    await second.start(Prompt("Well?"))
    assert await content_of(first, "count") == await content_of(second, "count") == "1"
    pids = [int(await content_of(environment, "pid")) for environment in (first, second)]
    assert len(set(pids)) == 2
    await first.close()
    await second.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not [thread for thread in threading.enumerate() if "mcp" in thread.name]


async def test_a_shared_session_lasts_while_an_episode_uses_it() -> None:
    """Overlapping episodes share one process; an episode after them gets another."""
    server = stdio(shared=True)
    first, second, third = (McpEnvironment(server) for _ in range(3))
    await first.start(Prompt("Well?"))
    await second.start(Prompt("Well?"))
    assert [await content_of(first, "count"), await content_of(second, "count")] == ["1", "2"]
    await first.close()
    assert await content_of(second, "count") == "3"
    await second.close()
    await third.start(Prompt("Well?"))
    assert await content_of(third, "count") == "1"
    await third.close()


async def test_a_cancelled_call_ends_and_the_session_goes_on(server: McpServer) -> None:
    """A deadline around a step cancels its own call only."""
    environment = McpEnvironment(server)
    await environment.start(Prompt("Well?"))
    with anyio.move_on_after(0.3) as scope:
        await content_of(environment, "sleep")
    assert scope.cancelled_caught
    assert await content_of(environment, "add", a=1, b=1) == "2"
    await environment.close()


# -- servers that die -------------------------------------------------------------------------------------------------


async def test_a_server_that_dies_in_a_call_is_restarted(server: McpServer) -> None:
    """The model reads that the effect is not known; a new process answers the next call."""
    environment = McpEnvironment(server)
    await environment.start(Prompt("Well?"))
    lost = await step(environment, ("end", {}), ("add", {"a": 1, "b": 1}))
    assert "ended during a call" in lost.messages[0].content
    assert "not known" in lost.messages[0].content
    assert lost.messages[1].content == "2"
    assert lost.metrics == {"tool_errors": 1, "mcp_sessions_lost": 1}
    await environment.close()


async def test_a_server_that_died_between_two_calls_is_restarted(server: McpServer) -> None:
    """No call was running when it ended."""
    environment = McpEnvironment(server)
    await environment.start(Prompt("Well?"))
    os.kill(int(await content_of(environment, "pid")), signal.SIGKILL)
    texts = [await content_of(environment, "add", a=1, b=1) for _ in range(2)]
    assert texts[1] == "2"
    assert texts[0].startswith(("2", "Error: "))
    await environment.close()


def played(server: McpServer, *calls: str) -> Any:
    """An episode in which the model makes these calls, then ends."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    texts = [f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in calls]
    replies = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in [*texts, "Done."]]
    run = partial(run_agent, sampling=SamplingParams(), limits=Limits(max_turns=9))
    return run(Prompt("Go."), partial(McpEnvironment, server), ScriptedPolicy(replies), renderer_for(tokenizer))


async def test_a_server_that_cannot_be_started_again_fails_the_episode(tmp_path: Path) -> None:
    """As a failure of the environment's step, with the stderr of the server that did not start."""
    server = stdio(env={"MCP_TOOLS_DEAD": str(tmp_path / "dead")}, only=("count", "end"))
    trajectory = await played(server, "count", "end")
    assert trajectory.stop_reason is StopReason.FAILED
    assert (trajectory.failure.kind, trajectory.failure.cause) == ("EnvironmentFailure", "environment_step")
    assert "the disk is gone" in trajectory.failure.message
    assert len(trajectory.completions) == 2


async def test_a_server_that_is_gone_before_the_episode_fails_its_start(tmp_path: Path) -> None:
    """It listed its tools once, and is no longer reachable."""
    server = stdio(env={"MCP_TOOLS_DEAD": str(tmp_path / "dead")}, only=("count",))
    assert server.tools
    (tmp_path / "dead").touch()
    trajectory = await played(server, "count")
    assert trajectory.failure.cause == "environment_start"


async def test_an_http_server_that_is_gone_fails_the_episode(http: tuple[str, subprocess.Popen[str]]) -> None:
    """During a call; afterwards no server answers at the URL."""
    trajectory = await played(McpServer(url=http[0], only=("count", "end"), call_seconds=1), "count", "end")
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.failure.cause == "environment_step"


async def test_an_episode_with_a_server_is_exact_and_ends_by_itself(server: McpServer) -> None:
    """The loop, the tools, and a reply without calls at the end."""
    trajectory = await played(server, "count", "count")
    assert trajectory.stop_reason is StopReason.TASK_COMPLETED
    assert [message.content for message in trajectory.messages if message.role == "tool"] == ["1", "2"]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a command or a url"),
        ({"command": ("x",), "url": "http://h"}, "a command or a url"),
        ({"url": "localhost:8000"}, "McpServer.url"),
        ({"url": "http://h", "call_seconds": 0}, "McpServer.call_seconds"),
    ],
)
def test_a_server_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    """By the name of the field."""
    with pytest.raises(ConfigError, match=words):
        McpServer(**options)


def test_a_server_that_does_not_start_is_named() -> None:
    """A missing program, a silent program, and a program that does not speak MCP."""
    for command, words in (
        (("no-such-program-here",), "no-such-program-here"),
        ((sys.executable, "-c", "import sys; sys.exit('no licence')"), "no licence"),
        ((sys.executable, "-c", "input()"), "did not start|did not answer"),
    ):
        with pytest.raises(ConfigError, match=words):
            _ = McpServer(command=command, open_seconds=3).tools


def test_tools_that_are_not_there_or_there_twice_are_refused() -> None:
    """Before the first rollout."""
    with pytest.raises(ConfigError, match=r"McpServer\.only.*nothing"):
        _ = stdio(only=("nothing",)).tools
    both = McpEnvironment(stdio(name="one"), stdio(name="two"))
    with pytest.raises(ConfigError, match="two and one both have it"):
        _ = both.tools


# -- a published server -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not importlib.util.find_spec("mcp_server_time"), reason="mcp-server-time is not installed")
async def test_a_published_server() -> None:
    """``mcp-server-time`` as it comes from PyPI."""
    server = McpServer(command=(sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"))
    environment = McpEnvironment(server)
    assert {tool.name for tool in environment.tools} == {"get_current_time", "convert_time"}
    await environment.start(Prompt("Well?"))
    arguments = {"source_timezone": "UTC", "time": "16:30", "target_timezone": "Asia/Kolkata"}
    assert "22:00" in await content_of(environment, "convert_time", **arguments)
    assert (await content_of(environment, "get_current_time", timezone="Nowhere/At all")).startswith("Error")
    await environment.close()
