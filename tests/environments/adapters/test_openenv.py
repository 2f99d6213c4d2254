"""Environments of real OpenEnv servers, in a thread of this process: one with actions, one with MCP tools."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from rollouts.dtypes import Message, Prompt, ToolCall
from rollouts.environments.adapters.openenv import OpenEnvEnvironment
from rollouts.errors import EnvironmentFailure
from rollouts.testing.playing import calling, play

pytest.importorskip("openenv")
pytestmark = [pytest.mark.extra, pytest.mark.filterwarnings("default")]  # OpenEnv's own warnings are its own


def guess_app() -> Any:
    """An environment with one action, ``guess``."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Guess(Action):  # type: ignore[misc]
        guess: int

    class Hint(Observation):  # type: ignore[misc]
        hint: str = ""

    class Game(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
            self.number = 5 if seed is None else seed
            return Hint(hint="Guess.")

        def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
            right = action.guess == self.number
            return Hint(hint="Right." if right else "No.", done=right, reward=1.0 if right else -0.5)

        @property
        def state(self) -> State:
            return State()

    return create_app(Game, Guess, Hint, max_concurrent_envs=4)


def tools_app() -> Any:
    """An environment with two MCP tools."""
    from fastmcp import FastMCP
    from openenv.core.env_server import Observation, State, create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Tools(MCPEnvironment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("tools")

            @server.tool
            def add(a: int, b: int) -> int:
                """Add two integers."""
                return a + b

            super().__init__(server)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
            return Observation()

        def _step_impl(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
            return Observation()

        @property
        def state(self) -> State:
            return State()

    return create_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=4)


def served(app: Any) -> Iterator[str]:
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    started = threading.Event()
    startup = server.startup

    async def announced(sockets: Any = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = announced
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(30)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)


@pytest.fixture(scope="module")
def guess_url() -> Iterator[str]:
    """The URL of the server with actions."""
    yield from served(guess_app())


@pytest.fixture(scope="module")
def tools_url() -> Iterator[str]:
    """The URL of the server with tools."""
    yield from served(tools_app())


async def test_each_reply_is_an_action(guess_url: str) -> None:
    """Observations are strings, rewards and end come from the steps; a reply that is not an action is answered."""
    environment = OpenEnvEnvironment(guess_url, action=lambda text: {"guess": int(text)})
    played = await play(environment, Prompt("Play!", metadata={"reset": {"seed": 7}}), ["5", "seven", "7"])
    texts = [message.content for message in played.messages]
    assert texts[:3] == ["Play!\n\nGuess.", "5", "No."]
    assert "invalid literal" in texts[4]
    assert (played.rewards, played.done) == ([-0.5, 1.0], True)


async def test_two_episodes_have_sessions_of_their_own(guess_url: str) -> None:
    """One rollout does not see another's state."""
    environment = partial(OpenEnvEnvironment, guess_url, action=lambda text: {"guess": int(text)})
    first, second = environment(), environment()
    await first.start(Prompt("Play!", metadata={"reset": {"seed": 7}}))
    await second.start(Prompt("Play!", metadata={"reset": {"seed": 8}}))
    assert (await first.step(Message("assistant", "7"))).done
    assert not (await second.step(Message("assistant", "7"))).done
    await first.close()
    await second.close()


async def test_the_tools_of_an_environment_are_those_of_the_model(tools_url: str) -> None:
    """Schemas as listed, results as text, an error as a message; a reply without a call ends the episode."""
    environment = OpenEnvEnvironment(tools_url)
    calls = [ToolCall("add", {"a": 1, "b": 2}, id="a"), ToolCall("subtract", {}, id="b")]
    played = await play(environment, "Add.", [Message("assistant", "", calls), calling("add", a=5, b=5), "10"])
    (tool,) = environment.tools
    assert (tool.name, tool.description, sorted(tool.parameters["properties"])) == (
        "add",
        "Add two integers.",
        ["a", "b"],
    )
    said = [message.content for message in played.messages if message.role == "tool"]
    assert (said[0], said[2]) == ("3", "10")
    assert said[1].startswith("Error: ")
    assert [step.metrics["tool_errors"] for step in played.steps] == [1, 0, 0]
    assert played.done


async def test_an_environment_without_tools_needs_action(guess_url: str) -> None:
    """The first episode fails, with the reason."""
    with pytest.raises((EnvironmentFailure, RuntimeError)):
        await play(OpenEnvEnvironment(guess_url), "Play!", [])
