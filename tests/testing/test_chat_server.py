"""The stub of the chat API is as strict as the API."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from rollouts.chat_api import ChatEndpoint, chat_rollout_to_samples
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.testing.chat_server import ChatServer, problem_of
from tests.chat_api.sums import KEY, solve, tasks

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
SOUND: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "u"},
    ],
    "tools": [TOOL],
    "temperature": 1.0,
    "max_completion_tokens": 5,
    "stop": ["x"],
    "seed": 3,
}


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        inner: Any = body
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value

    return change


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        inner: Any = body
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]

    return change


def test_a_sound_request_has_no_problem() -> None:
    assert problem_of(SOUND) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (at("top_k", value=1), "Unrecognized request argument supplied: top_k"),
        (without("model"), "you must provide a model parameter"),
        (at("temperature", value=3), "between 0 and 2"),
        (at("temperature", value=True), "expected a number"),
        (at("max_completion_tokens", value=1.5), "expected an integer"),
        (at("max_tokens", value=5), "at the same time"),
        (at("stop", value=list("abcde")), "1 to 4 strings"),
        (at("seed", value="3"), "expected an integer"),
        (at("reasoning_effort", value="some"), "Supported values"),
        (at("tools", value=[]), "1 to 128 tools"),
        (at("tools", 0, "function", "name", value="a b"), "does not match pattern"),
        (at("tools", 0, "function", "parameters", value={"type": "array"}), "schema must be"),
        (at("tools", 0, "function", "code", value="x"), "Unknown parameter: 'tools[0].function.code'"),
        (at("messages", value=[]), "minimum length 1"),
        (at("messages", 0, "role", value="robot"), "messages.[0].role"),
        (at("messages", 1, "content", value=None), "Missing required parameter: 'messages.[1].content'"),
        (at("messages", 1, "content", value=[{"type": "video"}]), "messages.[1].content"),
        (at("messages", 2, "reasoning_content", value="r"), "'reasoning_content' was unexpected"),
        (at("messages", 2, "tool_calls", value=[]), "empty array"),
        (at("messages", 2, "tool_calls", 0, "function", "arguments", value={}), "messages.[2].tool_calls[0].function"),
        (at("messages", 3, "name", value="add"), "'name' was unexpected"),
        (at("messages", 3, "tool_call_id", value="c2"), "must be a response to a preceding message"),
        (without("messages", 3), "must be followed by tool messages"),
        (without("messages", 2), "must be a response to a preceding message"),
        (at("messages", 4, "content", value=None), "expected a string, got null"),
    ],
)
def test_a_wrong_field_is_refused_as_the_api_does(change: Callable[[dict[str, Any]], None], words: str) -> None:
    """Field by field, and the order of calls and results."""
    body = copy.deepcopy(SOUND)
    change(body)
    problem = problem_of(body)
    assert problem is not None
    assert words in problem[0]


@pytest.mark.extra
async def test_the_sdk_of_the_api_reads_the_stub_and_its_types_take_our_requests() -> None:
    """openai's own client parses replies and errors; its types of a request take our bodies, and have their fields."""
    openai = pytest.importorskip("openai")
    from openai.types.chat import ChatCompletion
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
    from pydantic import TypeAdapter

    async with (
        ChatServer(solve) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client,
    ):
        endpoint = ChatEndpoint(model="stub", base_url=server.url, api_key=KEY)
        await chat_rollout_to_samples(tasks(1)[0], environment_cls=CalculatorEnvironment, endpoint=endpoint)
        bodies = [one.body for one in server.asked]
        reply = await client.chat.completions.create(**bodies[0])
        ChatCompletion.model_validate(reply.model_dump(), strict=True)
        assert reply.choices[0].message.tool_calls[0].function.name == "add"
        for change, error in (({"temperature": 3}, openai.BadRequestError), ({"model": "x"}, openai.NotFoundError)):
            with pytest.raises(error) as raised:
                await client.chat.completions.create(**{**bodies[0], **change})
            assert raised.value.body["type"] == "invalid_request_error"
        client.api_key = "other"
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**bodies[0])
    for body in bodies:
        TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body)
        assert body.keys() <= get_type_hints(CompletionCreateParamsNonStreaming).keys()
