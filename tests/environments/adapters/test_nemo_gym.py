"""A resources server of NeMo Gym, as a strict fake of its documented protocol: the package cannot be installed here.

The fake follows NeMo Gym 0.7: ``/seed_session`` gets the row and sets the cookie of the session, every later request
must bring it, a tool is a path, ``/verify`` gets the row with a response of the Responses API.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rollouts.dtypes import Message, Prompt
from rollouts.environments.adapters.nemo_gym import NeMoGymEnvironment, row_to_prompt
from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.testing.playing import calling, play

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
INPUT = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": [{"type": "input_text", "text": "Is it cold in Oslo?"}]},
]
ROW = {"responses_create_params": {"input": INPUT, "tools": [WEATHER]}, "expected": "cold", "difficulty": 3}


class Gym:
    """The server; ``verified`` are the bodies of ``/verify``."""

    def __init__(self) -> None:
        self.sessions: dict[str, list[str]] = {}
        self.verified: list[dict[str, Any]] = []
        self.url = ""

    def session(self, request: web.Request) -> list[str]:
        name = request.cookies.get("session")
        if name not in self.sessions:
            raise web.HTTPBadRequest(text="no session")
        return self.sessions[name]

    async def seed_session(self, request: web.Request) -> web.Response:
        assert (await request.json())["expected"] == "cold"
        response = web.json_response({})
        name = f"s{len(self.sessions)}"
        self.sessions[name] = []
        response.set_cookie("session", name, path="/", httponly=True, samesite="lax")
        return response

    async def get_weather(self, request: web.Request) -> web.Response:
        city = (await request.json())["city"]
        self.session(request).append(city)
        if city == "Atlantis":
            return web.json_response({"detail": "unknown city"}, status=422)
        return web.json_response({"city": city, "degrees": -4})

    async def verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        visited = self.session(request)
        self.verified.append(body)
        said = body["response"]["output"][-1]["content"][0]["text"]
        return web.json_response({**body, "reward": float(body["expected"] in said), "visited": len(visited)})


@pytest.fixture
async def gym() -> AsyncIterator[Gym]:
    """A running server."""
    gym, app = Gym(), web.Application()
    for name in ("seed_session", "get_weather", "verify"):
        app.router.add_post(f"/{name}", getattr(gym, name))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gym.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield gym
    await runner.cleanup()


def test_a_row_becomes_a_prompt() -> None:
    """Messages of its input, and the whole row as metadata."""
    prompt = row_to_prompt(ROW)
    assert prompt.messages == (Message("system", "Use the tool."), Message("user", "Is it cold in Oslo?"))
    assert prompt.metadata == ROW
    assert row_to_prompt({"responses_create_params": {"input": "Hi"}}).messages == (Message("user", "Hi"),)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"expected": 1}, r"row\['responses_create_params'\]: got None"),
        (
            {"responses_create_params": {"input": [{"type": "function_call", "name": "x"}]}},
            "expected messages",
        ),
    ],
)
def test_a_row_that_is_no_prompt_is_refused(row: dict[str, Any], words: str) -> None:
    """The message names the field."""
    with pytest.raises(ConfigError, match=words):
        row_to_prompt(row)


async def test_an_episode_is_seeded_played_and_verified(gym: Gym) -> None:
    """The session's cookie comes back, the tool's body is the model's text, the reward and numbers are the server's."""
    environment = NeMoGymEnvironment(gym.url)
    played = await play(environment, row_to_prompt(ROW), [calling("get_weather", city="Oslo"), "It is cold."])
    assert played.messages[3].content == '{"city": "Oslo", "degrees": -4}'
    assert (played.rewards, played.done, played.steps[-1].metrics) == ([1.0], True, {"visited": 1.0})
    (body,) = gym.verified
    assert body["difficulty"] == 3
    assert [item["type"] for item in body["response"]["output"]] == ["function_call", "function_call_output", "message"]
    assert body["response"]["output"][0]["arguments"] == '{"city":"Oslo"}'
    assert gym.sessions == {"s0": ["Oslo"]}


async def test_its_tools_are_those_of_the_row(gym: Gym) -> None:
    """With their schemas; a tool of another type is refused."""
    environment = NeMoGymEnvironment(gym.url)
    await environment.start(row_to_prompt(ROW))
    (tool,) = environment.tools
    assert (tool.name, tool.description, tool.parameters["required"]) == (
        "get_weather",
        "The weather of a city.",
        ["city"],
    )
    await environment.close()
    with pytest.raises(ConfigError, match=r"responses_create_params.tools"):
        _ = environment_with_search().tools


def environment_with_search() -> NeMoGymEnvironment:
    environment = NeMoGymEnvironment("http://127.0.0.1:1")
    environment._row = {"responses_create_params": {"input": "Hi", "tools": [{"type": "web_search"}]}}
    return environment


async def test_an_error_of_a_tool_is_a_message_to_the_model(gym: Gym) -> None:
    """As in NeMo Gym's simple agent, and counted."""
    environment = NeMoGymEnvironment(gym.url)
    played = await play(environment, row_to_prompt(ROW), [calling("get_weather", city="Atlantis"), "Cold?"])
    assert played.messages[3].content == '{"detail": "unknown city"}'
    assert played.steps[0].metrics == {"tool_errors": 1}


async def test_a_server_that_refuses_the_session_fails_the_rollout(gym: Gym) -> None:
    """With its status and its text."""
    environment = NeMoGymEnvironment(f"{gym.url}/elsewhere")
    with pytest.raises(EnvironmentFailure, match=r"elsewhere/seed_session: got status 404"):
        await play(environment, row_to_prompt(ROW), [])


def test_a_url_without_a_scheme_is_refused() -> None:
    """Before the first episode."""
    with pytest.raises(ConfigError, match=r"base_url: got 'localhost:1'"):
        NeMoGymEnvironment("localhost:1")


async def test_a_prompt_that_is_no_row_is_refused(gym: Gym) -> None:
    """Its server would get nothing to verify."""
    with pytest.raises(ConfigError, match=r"row\['responses_create_params'\]"):
        await play(NeMoGymEnvironment(gym.url), Prompt("Hi"), [])
