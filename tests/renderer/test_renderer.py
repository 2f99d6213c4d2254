"""The cache of openings: equal messages and tools share one opening."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from rollouts.dtypes import Message, Tool, ToolCall, as_messages
from rollouts.engine import DEMO_MODEL
from rollouts.renderer import Renderer, load_tokenizer

DEMO = load_tokenizer(DEMO_MODEL)
USER = Message("user", "What is it?")
ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer", "default": 1}}})


@pytest.fixture
def renderer() -> Renderer:
    """A renderer that is not shared, because its counter is read."""
    return Renderer(DEMO)


def called(argument: Any) -> list[Message]:
    return [USER, Message("assistant", tool_calls=(ToolCall("add", {"a": argument}, id="c"),)), Message("tool", "2")]


def copies_of(messages: list[Message], tools: list[Tool]) -> tuple[list[Message], list[Tool]]:
    """Equal messages and tools, as other objects."""
    return [attrs.evolve(message) for message in messages], [attrs.evolve(tool) for tool in tools]


@pytest.mark.parametrize("messages", [[USER], called(1)])
@pytest.mark.parametrize("tools", [[], [ADD]])
def test_equal_messages_and_tools_are_encoded_once(renderer: Renderer, messages: Any, tools: Any) -> None:
    """Also when they are other objects."""
    first = renderer.opening(messages, tools)
    encoded = renderer.encoded_tokens
    assert renderer.opening(*copies_of(messages, tools)) is first
    assert renderer.opening(tuple(messages), tuple(tools)) is first
    assert renderer.encoded_tokens == encoded


def test_any_difference_gives_another_opening(renderer: Renderer) -> None:
    """Also values equal in Python but not in a template, the order of keys, a name, reasoning; also in tools."""
    other = attrs.evolve(ADD, parameters={**ADD.parameters, "properties": {"a": {"type": "integer", "default": True}}})
    conversations = [
        [USER], [attrs.evolve(USER, name="u")], [USER, USER], [Message("system", USER.content)],
        [USER, Message("assistant", "A", reasoning=None)], [USER, Message("assistant", "A", reasoning="")],
        *map(called, (1, True, 1.0, {"a": 1, "b": 2}, {"b": 2, "a": 1})),
    ]  # fmt: skip
    tools: list[list[Tool]] = [[], [ADD], [other], [ADD, other], [other, ADD]]
    openings = [renderer.opening(messages, chosen) for messages in conversations for chosen in tools]
    assert len({id(opening) for opening in openings}) == len(openings)
    again = [renderer.opening(messages, chosen) for messages in conversations for chosen in tools]
    assert all(one is two for one, two in zip(openings, again, strict=True))


def test_the_cache_does_not_change_an_opening(renderer: Renderer) -> None:
    """Arguments that are equal in Python are rendered differently."""
    for argument in (1, True, 1.0):
        messages = called(argument)
        assert renderer.decode(renderer.opening(messages, [ADD])) == renderer.render(messages, [ADD])


@pytest.mark.parametrize("name", [None, "qwen3", "qwen2_5"])
def test_a_prompt_of_a_data_set_is_rendered_as_transformers_renders_it(
    name: str | None, small_tokenizer: Callable[..., Any]
) -> None:
    """Tools with unknown and absent keys, and earlier calls with arguments as JSON text, give the same opening."""
    plain = DEMO if name is None else small_tokenizer(name)
    tools = [
        {"type": "function", "function": {"strict": True, "name": "add", "parameters": {"properties": {"a": {}}}}},
        {"type": "function", "function": {"parameters": {"properties": {}}, "name": "now", "description": "?"}},
    ]
    call: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": "ü"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    expected = plain.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    as_text = {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
    stored = [{**messages[0], "role": "developer"}, messages[1], {**messages[2], "tool_calls": [as_text]}, messages[3]]
    opening = Renderer(plain).opening(as_messages(stored), [Tool.from_chat(tool) for tool in tools])
    assert opening.tolist() == expected


def test_results_of_the_self_test_are_kept_for_the_latest_sets_of_tools() -> None:
    """An environment with other tools for each prompt does not grow the cache; the latest result is in it."""
    renderer = Renderer(DEMO)
    found = renderer.self_test()
    renderer._tests._results.update(dict.fromkeys(range(2000), found))
    latest = renderer.self_test([Tool("look", "Looks.")])
    assert len(renderer._tests._results) == 1024
    assert renderer.self_test([Tool("look", "Looks.")]) is latest
