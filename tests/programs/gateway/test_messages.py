"""The Messages API: every block of a request, and answers of every form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.programs.gateway import messages
from rollouts.programs.gateway.types import ApiError, CallRequest
from rollouts.programs.gateway.wire import encoded
from tests.programs.gateway.scripted import REPLIES, data_of, named_events

ASKED = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
MARK = {"cache_control": {"type": "ephemeral"}}


def read(**fields: Any) -> CallRequest:
    return messages.read({**ASKED, **fields})


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(number: int, given: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"c{number}", "name": f"f{number}", "input": {} if given is None else given}


def result(number: int, content: Any = "out") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"c{number}", "content": content, "is_error": False}


def test_a_conversation_is_read_with_its_calls_and_results() -> None:
    """System blocks, thinking, calls, results, system messages in the middle; the marks of caching are dropped."""
    request = read(
        system=[{"type": "text", "text": "x-anthropic-billing-header: v=1"}, {**text("a"), **MARK}, text("b")],
        messages=[
            user(text("go"), {**text("on"), **MARK}),
            {"role": "system", "content": "reminder"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "r1"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("I look."),
                    {**use(1, {"x": 1}), **MARK},
                ],
            },
            user({**result(1, [text("o"), text("k")]), **MARK}, text("reminder")),
            {"role": "system", "content": [text("more")]},
            {"role": "assistant", "content": "done"},
        ],
    )
    assert request.messages == (
        Message("system", "a\nb"),
        Message("user", "go\non"),
        Message("system", "reminder"),
        Message("assistant", "I look.", [ToolCall("f1", {"x": 1}, "c1")], reasoning="hm"),
        Message("tool", "o\nk", tool_call_id="c1"),
        Message("user", "reminder"),
        Message("system", "more"),
        Message("assistant", "done"),
    )


@pytest.mark.parametrize(("system", "read_as"), [("be good", ["be good"]), ("", []), ([], []), (None, [])])
def test_the_system_prompt_is_optional(system: Any, read_as: list[str]) -> None:
    """It is a string or blocks; without text there is no system message."""
    contents = [message.content for message in read(system=system).messages if message.role == "system"]
    assert contents == read_as


def test_results_stand_before_the_texts() -> None:
    """In the order in which they were sent; the session puts them in the order of the calls."""
    asked = {"role": "assistant", "content": [use(1), use(2), use(3)]}
    request = read(messages=[asked, user(text("note"), result(3), result(9), result(1), result(2))])
    assert [message.tool_call_id or message.content for message in request.messages[1:]] == [
        "c3",
        "c9",
        "c1",
        "c2",
        "note",
    ]


def test_a_message_without_text_is_no_empty_message() -> None:
    """Results alone are only results; a message without any block is the empty text."""
    assert [message.role for message in read(messages=[user(result(1))]).messages] == ["tool"]
    assert read(messages=[user()]).messages == (Message("user", ""),)


def test_documents_are_their_text_where_they_have_one() -> None:
    """Text, blocks and search results are text; other documents are named and counted."""
    request = read(
        messages=[
            user(
                {"type": "document", "source": {"type": "text", "data": "a"}},
                {"type": "document", "source": {"type": "content", "content": [text("b")]}},
                {"type": "document", "source": {"type": "base64", "data": "x"}},
                {"type": "search_result", "title": "t", "source": "s", "content": [text("c")]},
            )
        ]
    )
    assert request.messages == (Message("user", "a\nb\n[file]\nt\ns\nc"),)
    assert request.counts == {"file": 1}


def test_an_input_that_is_no_object_is_kept_as_text() -> None:
    """A program that sends a malformed call back is not refused."""
    (kept,) = read(messages=[{"role": "assistant", "content": [use(1, "{bad")]}]).messages[0].tool_calls
    assert (kept.raw, kept.fault, kept.arguments) == ("{bad", "not_json", {})


def test_the_options_of_a_request_are_read() -> None:
    """Limits, stop strings, stream and model."""
    request = read(stop_sequences=["a", "b"], stream=True)
    assert (request.max_tokens, request.stop, request.stream, request.model) == (100, ("a", "b"), True, "m")
    plain = messages.read({"messages": ASKED["messages"]})
    assert (plain.max_tokens, plain.stop, plain.stream, plain.model, plain.counts) == (None, (), False, "", {})


def test_only_tools_of_the_program_are_offered() -> None:
    """Others are counted by their type."""
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [
        {"name": "f", "description": "d", "input_schema": schema, **MARK},
        {"type": "custom", "name": "g", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    request = read(tools=tools)
    assert request.tools == (Tool("f", "d", schema), Tool("g", "", {"type": "object"}))
    assert request.counts == {"server_tool/web_search_20250305": 1}
    assert read(tools=tools, tool_choice={"type": "none"}).tools == ()


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"tool_choice": {"type": "any"}}, ["not_enforced/tool_choice"]),
        ({"tool_choice": {"type": "tool", "name": "f"}}, ["not_enforced/tool_choice"]),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ["not_enforced/parallel_tool_calls"]),
        (
            {"output_config": {"effort": "high", "format": {"type": "grammar"}}},
            ["not_enforced/output_config.format"],
        ),
        ({"output_format": {"type": "grammar"}}, ["not_enforced/output_config.format"]),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            ["not_enforced/context_management"],
        ),
        ({"mcp_servers": [{"type": "url"}]}, ["server_tool/mcp"]),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, ["not_enforced/defer_loading"]),
        ({"messages": [user({**result(1, "r"), "is_error": True}, result(2, "s"))]}, ["not_shown/is_error"]),
        (
            {
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "high"},
                "metadata": {"user_id": "u"},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "tool_choice": {"type": "auto"},
            },
            [],
        ),
    ],
)
def test_what_is_not_honoured_is_counted(fields: dict[str, Any], counts: list[str]) -> None:
    """By the name of the field; a field without effect is not."""
    assert read(**fields).counts == dict.fromkeys(counts, 1)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": []}, "messages: got []"),
        ({"messages": {}}, "messages: got {}"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role: got 'tool'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: got 3"),
        ({"messages": [user({"type": "x"})]}, "messages[0].content[0].type: got 'x'"),
        ({"messages": [user({"type": "text", "text": 3})]}, "messages[0].content[0].text: got 3"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id: got None"),
        ({"messages": [user(result(1, 3))]}, "messages[0].content[0].content: got 3"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
            "messages[0].content[0].name",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages[0].content[0].thinking"),
        ({"system": 3}, "system: got 3"),
        ({"system": [{}]}, "system[0].type: got None"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema: got []"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name: got None"),
        ({"tool_choice": "auto"}, "tool_choice: got 'auto'"),
        ({"tool_choice": {}}, "tool_choice.type: got None"),
        ({"max_tokens": "100"}, "max_tokens: got '100'"),
        ({"stop_sequences": [3]}, "stop_sequences: got [3]"),
        ({"stream": "x"}, "stream: got 'x'"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], path: str) -> None:
    """With its path, its value and what is expected."""
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.error_kind == "invalid_request"
    assert str(caught.value).startswith(path)
    assert "expected" in str(caught.value)


def test_an_answer_has_every_field() -> None:
    """A reply with thinking, text and two calls; the ids that were read from a cache are counted apart."""
    assert messages.answer(read(), [REPLIES["everything"]]) == {
        "id": "msg_r1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "r1"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c00000001", "name": "bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "c00000002", "name": "read", "input": {"path": "a\u2028b"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 40,
            "output_tokens": 20,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 60,
        },
    }


@pytest.mark.parametrize(
    ("name", "reason", "stop"),
    [
        ("text", "end_turn", None),
        ("call", "tool_use", None),
        ("cut", "max_tokens", None),
        ("stopped", "stop_sequence", "lo"),
        ("malformed call", "end_turn", None),
    ],
)
def test_the_reason_to_stop_is_that_of_the_reply(name: str, reason: str, stop: str | None) -> None:
    """A malformed call without stream is not a tool use."""
    whole = messages.answer(read(), [REPLIES[name]])
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)


def test_content_is_never_empty() -> None:
    """An empty reply is one empty text."""
    assert messages.answer(read(), [REPLIES["empty"]])["content"] == [{"type": "text", "text": ""}]


def test_a_malformed_call_is_its_text() -> None:
    """In a stream as the input of the call, whose type is text there; otherwise as a block of text."""
    reply = REPLIES["malformed call"]
    assert messages.answer(read(), [reply])["content"][-1] == {"type": "text", "text": "{bad"}
    sent = data_of(b"".join(messages.events(read(stream=True), [reply])))
    assert {"type": "input_json_delta", "partial_json": "{bad"} in [each.get("delta") for each in sent]
    assert next(each["delta"] for each in sent if each["type"] == "message_delta")["stop_reason"] == "tool_use"


@pytest.mark.parametrize("name", [name for name in REPLIES if name != "malformed call"])
def test_a_stream_is_the_answer_in_pieces(name: str) -> None:
    """The start has no content, each block is an empty shell and its deltas, the end has reason and usage."""
    whole = json.loads(encoded(messages.answer(read(), [REPLIES[name]])))
    events = named_events(b"".join(messages.events(read(stream=True), [REPLIES[name]])))
    assert all(kind == data["type"] for kind, data in events)
    started, *pieces, ended, stopped = [data for _, data in events]
    usage = {**whole["usage"], "output_tokens": 0}
    empty = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    assert started == {"type": "message_start", "message": empty}
    reasons = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert ended == {"type": "message_delta", "delta": reasons, "usage": whole["usage"]}
    assert stopped == {"type": "message_stop"}
    joined: list[dict[str, Any]] = []
    for piece in pieces:
        if piece["type"] == "content_block_start":
            assert piece["index"] == len(joined)
            joined.append({**piece["content_block"], "json": ""})
            continue
        assert piece["index"] == len(joined) - 1
        for kind, value in piece.get("delta", {}).items():
            if kind != "type":
                field = "json" if kind == "partial_json" else kind
                joined[-1][field] += value
    for block in joined:
        given = block.pop("json")
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(given)
    assert joined == whole["content"]


@pytest.mark.parametrize("name", ["text", "thought", "call", "everything"])
def test_an_echo_is_read_as_the_reply(name: str) -> None:
    """The content of an answer, sent back, is the message of the reply."""
    content = messages.answer(read(), [REPLIES[name]])["content"]
    assert read(messages=[{"role": "assistant", "content": content}]).messages == (REPLIES[name].message,)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError("invalid_request", "n: wrong"), 400, "invalid_request_error"),
        (ApiError("authentication", "who"), 401, "authentication_error"),
        (ApiError("not_found", "where"), 404, "not_found_error"),
        (ApiError("conflict", "over"), 409, "invalid_request_error"),
        (ApiError("too_large", "long"), 413, "request_too_large"),
        (ApiError("rate_limit", "slow"), 429, "rate_limit_error"),
        (ApiError("server", "broken"), 500, "api_error"),
    ],
)
def test_an_error_has_its_status_and_form(error: ApiError, status: int, kind: str) -> None:
    """Also as an event of a stream."""
    body = {"type": "error", "error": {"type": kind, "message": str(error)}}
    assert messages.error(error) == (status, body)
    assert named_events(messages.error_event(read(), error)) == [("error", body)]


def test_an_overflow_has_the_words_that_clients_know() -> None:
    """They start the compaction of a history."""
    status, body = messages.error(ApiError("overflow", "", tokens=9000, max_context=8192))
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert body["error"]["message"] == "prompt is too long: 9000 tokens > 8192 maximum"
