"""The chat completions API: every field of a request, and answers of every form."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.programs.gateway import chat
from rollouts.programs.gateway.types import ApiError, CallRequest
from rollouts.programs.gateway.wire import encoded
from tests.programs.gateway.scripted import BAD, CALL, REPLIES, data_of

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def read(**fields: Any) -> CallRequest:
    return chat.read({**ASKED, **fields})


def refused(**fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.error_kind == "invalid_request"
    return str(caught.value)


def test_a_conversation_is_read_with_its_calls_and_results() -> None:
    """Roles, parts, reasoning, calls and results become messages; developer is system; names of tools are filled in."""
    request = read(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "go", "name": "me"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "refusal": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}},
                    {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
                    {"id": "c3", "type": "custom", "custom": {"name": "patch", "input": "+x"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "out"}]},
            {"role": "assistant", "refusal": "no", "provider_specific_fields": {"reasoning_content": "hm2"}},
        ]
    )
    calls = [
        ToolCall("bash", {"command": "ls"}, "c1"),
        ToolCall("now", {}, "c2"),
        ToolCall("patch", {"input": "+x"}, "c3"),
    ]
    assert request.messages == (
        Message("system", "a\nb"),
        Message("user", "go"),
        Message("assistant", "", calls, reasoning="hm"),
        Message("tool", "out", tool_call_id="c1"),
        Message("assistant", "no", reasoning="hm2"),
    )


@pytest.mark.parametrize("arguments", ["{bad", "[1]", '"x"', "null", [1], 3])
def test_arguments_that_are_no_object_are_kept_as_text(arguments: Any) -> None:
    """A program that sends a malformed call back is not refused: the text is in ``raw``."""
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    (read_call,) = read(messages=[{"role": "assistant", "tool_calls": [call]}]).messages[0].tool_calls
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    assert (read_call.raw, read_call.arguments, read_call.fault) == (text, {}, "not_json")
    assert read_call.error


def test_the_options_of_a_request_are_read() -> None:
    """Limits, stop strings, stream, n, model and the wish for usage."""
    request = read(
        max_tokens=50,
        max_completion_tokens=40,
        stop=["a", "b"],
        stream=True,
        n=3,
        stream_options={"include_usage": True},
    )
    assert (request.max_tokens, request.stop, request.stream, request.n) == (40, ("a", "b"), True, 3)
    assert (request.model, request.include_usage) == ("m", True)
    assert read(stop="a", max_tokens=7).stop == ("a",)
    plain = read(stop=None, stream=None, n=None, max_tokens=None, tools=None)
    assert (plain.max_tokens, plain.stop, plain.stream, plain.n, plain.counts) == (None, (), False, 1, {})


def test_tools_are_read_in_one_form() -> None:
    """A function keeps name, description and schema; ``none`` offers no tools; other kinds of tools are counted."""
    function = {
        "name": "bash",
        "description": "Run",
        "parameters": {"type": "object", "properties": {}},
        "strict": True,
    }
    tools = [{"type": "function", "function": function}, {"type": "custom", "custom": {"name": "patch"}}]
    request = read(tools=tools)
    assert request.tools == (Tool("bash", "Run", {"type": "object", "properties": {}}),)
    assert (request.counts, request.strict) == ({"server_tool/custom": 1}, {"bash"})
    assert read(tools=tools, tool_choice="none").tools == ()
    assert read(tools=[{"type": "function", "function": {"name": "f"}}]).tools == (Tool("f"),)


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"tool_choice": "auto", "parallel_tool_calls": True}, []),
        ({"response_format": {"type": "text"}, "logprobs": False, "user": "u", "metadata": {}, "store": True}, []),
        ({"reasoning_effort": "high"}, []),
        ({"tool_choice": "required"}, ["not_enforced/tool_choice"]),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ["not_enforced/tool_choice"]),
        ({"response_format": {"type": "structural_tag"}}, ["not_enforced/response_format"]),
        ({"parallel_tool_calls": False}, ["not_enforced/parallel_tool_calls"]),
        ({"logprobs": True, "top_logprobs": 3}, ["not_enforced/top_logprobs"]),
        ({"min_tokens": 3, "echo": True, "best_of": 1}, ["not_enforced/min_tokens", "not_enforced/echo"]),
        ({"modalities": ["text", "audio"]}, ["not_enforced/modalities"]),
        ({"no_such_field": 1, "nor_this": None}, ["unknown_field/no_such_field"]),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ["not_enforced/chat_template_kwargs"]),
        ({"guided_choice": ["a"], "regex": "a+"}, ["not_enforced/guided_choice"]),
        ({"structured_outputs": {"choice": ["a"]}}, ["not_enforced/structured_outputs"]),
        ({"tools": [{"type": 1000 * "x"}]}, [f"server_tool/{64 * 'x'}"]),
        ({"web_search_options": {}}, ["server_tool/web_search"]),
    ],
)
def test_what_is_not_honoured_is_counted(fields: dict[str, Any], counts: list[str]) -> None:
    """By the name of the field; a field without effect is not."""
    assert read(**fields).counts == dict.fromkeys(counts, 1)


def test_sampling_parameters_are_read_as_they_came() -> None:
    """The session compares the parameters with the run's; ``null`` counts as absent."""
    fields = {"temperature": 0.2, "top_p": 1, "seed": 3, "top_k": 5, "logit_bias": {}, "presence_penalty": 1}
    assert read(**fields, min_p=None).sampling == fields


@pytest.mark.parametrize(("kind", "name"), [("video_url", "video"), ("input_audio", "audio"), ("file", "file")])
def test_media_are_named_in_the_text_and_counted(kind: str, name: str) -> None:
    """A model of text sees that there was something."""
    request = read(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: {}}]}])
    assert request.messages == (Message("user", f"see\n[{name}]"),)
    assert request.counts == {name: 1}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": []}, "messages: got []"),
        ({"messages": None}, "messages: got None"),
        ({"messages": "hi"}, "messages: got 'hi'"),
        ({"messages": ["hi"]}, "messages[0]: got 'hi'"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role: got 'robot'"),
        ({"messages": [{"role": ["user"]}]}, "messages[0].role: got ['user']"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: got 3"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type: got 'x'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: got None"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id: got None"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls: got {}"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function: got None"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call: got {}"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: got None"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function: "),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0].function: "),
        ({"tool_choice": 3}, "tool_choice: got 3"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"max_tokens": True}, "max_tokens: got True"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens: got 1.5"),
        ({"n": 129}, "n: got 129"),
        ({"stop": [""]}, "stop: got ['']"),
        ({"stop": 3}, "stop: got 3"),
        ({"stream": "yes"}, "stream: got 'yes'"),
        ({"stream_options": []}, "stream_options: got []"),
        ({"functions": []}, "functions: got []"),
        ({"model": 3}, "model: got 3"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], path: str) -> None:
    """With its path, its value and what is expected."""
    message = refused(**fields)
    assert message.startswith(path)
    assert "expected" in message


def test_an_answer_has_every_field() -> None:
    """A reply with text, reasoning and two calls."""
    request = read()
    assert chat.answer(request, [REPLIES["everything"]]) == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {
                            "id": "c00000001",
                            "type": "function",
                            "function": {"name": "bash", "arguments": '{"command":"ls"}'},
                        },
                        {
                            "id": "c00000002",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"path":"a\\u2028b"}'},
                        },
                    ],
                },
                "finish_reason": "tool_calls",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 60},
            "completion_tokens_details": {"reasoning_tokens": 5},
        },
    }


def test_several_replies_are_choices_of_one_answer() -> None:
    """The prompt counts once, what was sampled is added up."""
    whole = chat.answer(read(n=2), [REPLIES["text"], REPLIES["cut"]])
    assert [(each["index"], each["finish_reason"]) for each in whole["choices"]] == [(0, "stop"), (1, "length")]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (100, 40)


def test_content_is_null_only_with_calls() -> None:
    """An empty reply is the empty text."""
    contents = {
        name: chat.answer(read(), [REPLIES[name]])["choices"][0]["message"]["content"] for name in ("call", "empty")
    }
    assert contents == {"call": None, "empty": ""}


@pytest.mark.parametrize("name", REPLIES)
def test_a_stream_is_the_answer_in_pieces(name: str) -> None:
    """The joined deltas are the message; a call is one piece; one chunk has the reason, the last one the usage."""
    request = read(stream=True, stream_options={"include_usage": True})
    *chunks, done = data_of(b"".join(chat.events(request, [REPLIES[name]])))
    whole = msgspec.json.decode(encoded(chat.answer(request, [REPLIES[name]])))
    assert done == "[DONE]"
    assert {(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks} == {
        (whole["id"], whole["created"], "chat.completion.chunk")
    }
    *pieces, last = chunks
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    message = whole["choices"][0]["message"]
    assert deltas[0] == {"role": "assistant"}
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message.get("reasoning_content", "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [{"index": k, **call} for k, call in enumerate(message.get("tool_calls", ()))]
    finished = [piece["choices"][0]["finish_reason"] for piece in pieces]
    assert finished == [None] * (len(finished) - 1) + [whole["choices"][0]["finish_reason"]]


def test_a_stream_has_usage_only_on_request() -> None:
    """Without ``include_usage`` no chunk has it, and each has one choice."""
    *chunks, _ = data_of(b"".join(chat.events(read(stream=True), [REPLIES["text"], REPLIES["cut"]])))
    assert not any("usage" in chunk for chunk in chunks)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 0, 0, 1, 1, 1]


def test_a_malformed_call_is_served_as_its_text() -> None:
    """The program sees what the model wrote, and reports it in its own way."""
    (call,) = chat.answer(read(), [REPLIES["malformed call"]])["choices"][0]["message"]["tool_calls"]
    assert call == {"id": BAD.id, "type": "function", "function": {"name": "bash", "arguments": "{bad"}}


def test_an_echo_is_read_as_the_reply() -> None:
    """The message of an answer, sent back, is the message of the reply."""
    message = chat.answer(read(), [REPLIES["everything"]])["choices"][0]["message"]
    assert read(messages=[message]).messages == (REPLIES["everything"].message,)
    assert CALL in REPLIES["everything"].message.tool_calls


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (ApiError("invalid_request", "n: wrong"), 400, "invalid_request_error", None),
        (ApiError("authentication", "who"), 401, "invalid_request_error", "invalid_api_key"),
        (ApiError("not_found", "where"), 404, "invalid_request_error", None),
        (ApiError("conflict", "over"), 409, "invalid_request_error", None),
        (ApiError("too_large", "long"), 413, "invalid_request_error", None),
        (ApiError("upgrade", "no"), 426, "invalid_request_error", None),
        (ApiError("rate_limit", "slow"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (ApiError("server", "broken"), 500, "server_error", None),
    ],
)
def test_an_error_has_its_status_and_form(error: ApiError, status: int, kind: str, code: str | None) -> None:
    """Also as an event of a stream."""
    body = {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
    assert chat.error(error) == (status, body)
    assert data_of(chat.error_event(read(), error)) == [body]


def test_an_overflow_has_the_words_that_clients_know() -> None:
    """Code and message are as in the API."""
    status, body = chat.error(ApiError("overflow", "", tokens=9000, max_context=8192))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["message"] == (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. "
        "Please reduce the length of the messages."
    )
