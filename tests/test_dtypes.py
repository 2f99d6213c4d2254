"""Plain values: immutable, validated when created, and without secrets in their text."""

from __future__ import annotations

import json
import pickle
from typing import Any

import attrs
import numpy as np
import pytest

from rollouts.dtypes import (
    Completion,
    Endpoint,
    Extras,
    Limits,
    Message,
    Prompt,
    SamplingParams,
    Tool,
    ToolCall,
    VersionSpan,
    as_messages,
    packed_logprobs,
    packed_tokens,
)
from rollouts.errors import ConfigError

BAD: list[tuple[type, dict[str, Any], str]] = [
    (SamplingParams, {"temperature": -1}, "SamplingParams.temperature: got -1; expected a number >= 0"),
    (SamplingParams, {"temperature": float("nan")}, "SamplingParams.temperature: got nan"),
    (SamplingParams, {"temperature": True}, "SamplingParams.temperature: got True"),
    (SamplingParams, {"top_p": 0}, "SamplingParams.top_p: got 0; expected a number in"),
    (SamplingParams, {"top_k": 0}, "SamplingParams.top_k: got 0; expected -1 or an integer >= 1"),
    (SamplingParams, {"max_new_tokens": 0}, "SamplingParams.max_new_tokens: got 0; expected an integer >= 1"),
    (SamplingParams, {"max_new_tokens": 2.0}, "SamplingParams.max_new_tokens: got 2.0"),
    (SamplingParams, {"stop": 5}, "SamplingParams.stop: got 5; expected"),
    (SamplingParams, {"stop": [5]}, "SamplingParams.stop: got"),
    (SamplingParams, {"stop": list(map(str, range(33)))}, "at most 32"),
    (Endpoint, {"provider": "openai"}, 'Endpoint.provider: got \'openai\'; expected "sglang" or "vllm"'),
    (Endpoint, {"base_url": "localhost:30000"}, "Endpoint.base_url: got"),
    (Endpoint, {"base_url": []}, "Endpoint.base_url: got"),
    (Endpoint, {"base_url": 30000}, "Endpoint.base_url: got 30000"),
    (Endpoint, {"base_url": [None]}, "Endpoint.base_url: got"),
    (Endpoint, {"max_retries": -1}, "Endpoint.max_retries: got -1"),
    (Endpoint, {"request_seconds": 0}, "Endpoint.request_seconds: got 0"),
    (Endpoint, {"model": ""}, "Endpoint.model: got ''"),
    (Limits, {"max_turns": 0}, "Limits.max_turns: got 0; expected an integer >= 1"),
    (Limits, {"max_tokens": 1}, "Limits.max_tokens: got 1"),
    (Limits, {"on_cut": "go"}, "Limits.on_cut: got 'go'"),
    (Limits, {"step_seconds": float("inf")}, "Limits.step_seconds: got inf"),
    (Message, {"role": "robot"}, "Message.role: got 'robot'"),
    (Message, {"role": ["user"]}, "Message.role: got"),
    (Message, {"role": "user", "content": None}, "Message.content: got None; expected a string"),
    (Tool, {"name": ""}, "Tool.name: got ''"),
    (Tool, {"name": "add", "parameters": {"type": "string"}}, "Tool.parameters: got"),
    (Prompt, {"prompt": {"role": "user"}}, "Prompt.prompt: got"),
    (Prompt, {"prompt": 3}, "Prompt.prompt: got 3"),
    (Prompt, {"prompt": ["hello"]}, "prompt: got 'hello'; expected a message or a chat dict"),
]


@pytest.mark.parametrize(("cls", "fields", "words"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_value_is_refused_by_field_value_and_expectation(cls: Any, fields: dict[str, Any], words: str) -> None:
    """When it is created, so that no other module validates it again."""
    with pytest.raises(ConfigError) as caught:
        cls(**fields)
    assert words in str(caught.value)


def test_the_api_key_is_never_printed() -> None:
    """Neither by repr and str nor by an error about another field."""
    endpoint = Endpoint(api_key="sk-secret", base_url=["http://a:1/", "http://b:2"])
    assert "secret" not in f"{endpoint!r} {endpoint} {[endpoint]}"
    assert endpoint.base_url == ("http://a:1", "http://b:2")
    with pytest.raises(ConfigError) as caught:
        Endpoint(api_key="sk-secret", model="")
    assert "secret" not in str(caught.value)


def test_values_cannot_be_changed() -> None:
    """They are frozen, and lists become tuples."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Limits().max_turns = 3  # type: ignore[misc]
    message = Message("assistant", tool_calls=[ToolCall("add")])
    assert isinstance(message.tool_calls, tuple)
    assert Prompt([message]).prompt == (message,)


def test_a_stop_string_is_one_string() -> None:
    """It is not split into characters."""
    assert SamplingParams(stop="</answer>").stop == ("</answer>",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "hi"),
        Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}, id="c1"),), reasoning="hm"),
        Message("tool", "8", tool_call_id="c1", name="add"),
    ],
)
def test_a_message_survives_its_chat_dict(message: Message) -> None:
    """``from_chat`` inverts ``to_chat``."""
    assert Message.from_chat(message.to_chat()) == message


def test_messages_in_any_shape() -> None:
    """Text, chat dicts and text parts are accepted, and nothing else."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert as_messages("ab") == as_messages(parts) == as_messages([Message("user", "ab")])
    with pytest.raises(ConfigError, match=r"message\.content: got"):
        as_messages([{"role": "user", "content": [{"type": "image_url"}]}])


def test_a_conversation_of_the_openai_api_is_read_as_it_is() -> None:
    """Role developer, arguments as JSON text and fields that a table fills with None need no conversion."""
    empty = {"name": None, "tool_calls": None, "tool_call_id": None}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}
    rows = [
        {"role": "developer", "content": "Be brief.", **empty},
        {"role": "user", "content": "1+1?", **empty},
        {"role": "assistant", "content": None, "thinking": "hm", **empty, "tool_calls": [call]},
        {"role": "tool", "content": "2", **empty, "tool_call_id": "c1"},
    ]
    assert as_messages(rows) == (
        Message("system", "Be brief."),
        Message("user", "1+1?"),
        Message("assistant", tool_calls=(ToolCall("add", {"a": 1, "b": "x"}, id="c1"),), reasoning="hm"),
        Message("tool", "2", tool_call_id="c1"),
    )


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "null", '{"a": NaN}', ["x"], 3])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    """The message names the field and shows the value; nothing is repaired."""
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ConfigError, match=r"message.tool_calls.arguments: got .*; expected an object, or an object as"):
        as_messages([{"role": "assistant", "tool_calls": [call]}])


def test_a_call_in_the_old_field_of_the_api_is_refused() -> None:
    """A call in function_call would be lost without a message."""
    with pytest.raises(ConfigError, match=r"message.function_call: got .*; expected none: tool_calls replaces"):
        as_messages([{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}])


@pytest.mark.parametrize(
    "function",
    [
        {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}, "strict": True},
        {"strict": False, "description": "Adds.", "name": "add"},
        {"name": "add", "description": None, "parameters": None},
        {"name": "add", "parameters": {}},
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_template_sees_the_tool_of_a_data_set_as_it_is(function: dict[str, Any], wrapped: bool) -> None:
    """Unknown keys, the order of keys, absent descriptions and absent types stay, and the tool is still readable."""
    chat = {"type": "function", "function": function}
    tool = Tool.from_chat(chat if wrapped else function)
    assert tool.name == "add"
    assert tool.description == (function.get("description") or "")
    assert json.dumps(tool.to_chat()) == json.dumps(chat)
    assert tool.parameters.get("properties", {}) == (function.get("parameters") or {}).get("properties", {})


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"type": "function"}, r"Tool.name: got ''"),
        ({"type": "function", "function": "add"}, r"tool: got .*; expected an object with a function that has a name"),
        ("add", r"tool: got 'add'; expected an object"),
        ({"name": "add", "parameters": {"type": "array"}}, r"Tool.parameters: got .*; expected a JSON schema of an"),
        ({"name": "add", "parameters": {"properties": None}}, r"Tool.parameters: got"),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused(chat: Any, message: str) -> None:
    """A tool needs a name, and an object schema for its arguments."""
    with pytest.raises(ConfigError, match=message):
        Tool.from_chat(chat)


@pytest.mark.parametrize("values", [[1.5], [2**31], [-(2**31) - 1], np.array([2**40]), np.array([0.5]), ["1"], [[1]]])
def test_a_token_id_is_never_changed_in_packing(values: Any) -> None:
    """A value that does not fit int32 exactly is refused, neither wrapped nor rounded."""
    with pytest.raises((ValueError, OverflowError)):
        packed_tokens(values)


def test_a_column_over_bytes_is_not_copied() -> None:
    """Bytes are immutable; a view of a writeable buffer is copied."""
    column = np.frombuffer(np.arange(3, dtype=np.int32).tobytes(), np.int32)
    assert packed_tokens(column) is column
    for buffer in (bytearray(column.tobytes()), memoryview(bytearray(column.tobytes())), np.arange(3, dtype=np.int32)):
        view = np.frombuffer(buffer, np.int32)
        view.flags.writeable = False
        packed = packed_tokens(view)
        np.frombuffer(buffer, np.int32)[0] = 9
        assert packed.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "values", [[], [1, 2], (1, 2), range(3), np.arange(3), np.arange(3, dtype=np.uint8), iter([4])]
)
def test_packed_columns_are_read_only_copies(values: Any) -> None:
    """int32 and float32, one dimension."""
    for pack, dtype in ((packed_tokens, np.int32), (packed_logprobs, np.float32)):
        column = pack(values)
        assert column.dtype == dtype
        assert not column.flags.writeable
        assert column.base is None


def completion(**fields: Any) -> Completion:
    valid: dict[str, Any] = {
        "tokens": [5, 6],
        "logprobs": [-0.1, -0.2],
        "finish_reason": "stop",
        "versions": [VersionSpan("v1", 0, 2)],
        "prompt_tokens": 3,
        "prompt_digest": 0,
        "request_id": "r",
    }
    return Completion(**{**valid, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": [-0.1]},
        {"logprobs": [-0.1, None]},
        {"logprobs": [-0.1, float("nan")]},
        {"logprobs": [-0.1, float("-inf")]},
        {"logprobs": [-0.1, 0.5]},
        {"versions": []},
        {"versions": [VersionSpan("v1", 0, 1)]},
        {"versions": [VersionSpan("v1", 0, 3)]},
        {"versions": [VersionSpan("v1", 0, 2), VersionSpan("v2", 1, 2)]},
        {"versions": [VersionSpan("v1", 1, 2), VersionSpan("v2", 0, 1)]},
        {"versions": [VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 2)]},
        {"finish_reason": "tool_calls"},
    ],
)
def test_a_completion_needs_a_logprob_and_a_version_for_each_token(fields: dict[str, Any]) -> None:
    """Law 2 is checked where tokens enter the package."""
    with pytest.raises(ValueError, match=r"\S"):
        completion(**fields)


def test_completions_compare_and_pickle() -> None:
    """The columns are arrays, and equality still returns a bool."""
    assert completion() == completion()
    assert completion() != completion(tokens=[5, 7])
    assert pickle.loads(pickle.dumps(completion())) == completion()
    assert len(completion(tokens=[], logprobs=[], versions=[]).tokens) == 0


def test_joined_extras_keep_the_first_row_of_each_position() -> None:
    """A later part may repeat rows, but a gap is an error."""

    def part(start: int, rows: list[int]) -> Extras:
        return Extras(({"seconds": 1.0},), np.array([[row] for row in rows], np.int32), start)

    joined = Extras.joined([part(2, [20, 21]), Extras(), part(3, [31, 32, 33]), part(0, [40] * 8)])
    assert joined.experts is not None
    assert joined.experts[:, 0].tolist() == [20, 21, 32, 33, 40, 40]
    assert (joined.experts_start, len(joined.requests), joined.top_p_ids) == (2, 3, None)
    with pytest.raises(ValueError, match="from position 5 on; expected 4 or less"):
        Extras.joined([part(2, [20, 21]), part(5, [1])])


def test_sets_of_top_p_add_up() -> None:
    """The sizes are those of the ids."""
    with pytest.raises(ValueError, match="have 3 ids; expected 4"):
        Extras(top_p_ids=packed_tokens([1, 2, 3]), top_p_counts=packed_tokens([2, 2]))
