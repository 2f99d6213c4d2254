"""Replies of the API, as different servers send them; and bodies without a reply."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollouts.chat_api.wire import Answer, ReplyWithheld, RoomExceeded, Unreadable, answer_of, error_of
from rollouts.errors import ContextOverflow, EndpointRefused, EndpointUnavailable

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def body(message: Any, finish: Any = "stop", **fields: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return msgspec.json.encode({"id": "x", "object": "chat.completion", "choices": [choice], **fields})


@pytest.mark.parametrize(
    ("message", "finish", "text", "calls", "reasoning"),
    [
        ({"role": "assistant", "content": "yes", "refusal": None, "annotations": []}, "stop", "yes", 0, None),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "tool_calls", "", 1, None),
        ({"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, "stop", "", 2, None),
        ({"role": "assistant", "content": "yes", "reasoning_content": "hm"}, "stop", "yes", 0, "hm"),
        ({"role": "assistant", "content": "yes", "reasoning": "hm", "tool_calls": []}, "stop", "yes", 0, "hm"),
        ({"role": "assistant", "content": "yes", "function_call": None, "audio": None}, "length", "yes", 0, None),
        ({"content": [{"type": "text", "text": "yes"}]}, "stop", "yes", 0, None),
        ({"role": "assistant", "content": None}, "stop", "", 0, None),
    ],
)
def test_a_reply_is_read(message: Any, finish: str, text: str, calls: int, reasoning: str | None) -> None:
    """With text, calls and thinking under each of the names that servers use."""
    answer, _ = answer_of(body(message, finish))
    assert isinstance(answer, Answer)
    read = answer.message
    assert (read.text, len(read.tool_calls), read.reasoning) == (text, calls, reasoning)
    assert answer.finish_reason == ("length" if finish == "length" else "stop")


@pytest.mark.parametrize(
    ("message", "finish", "text"),
    [
        ({"role": "assistant", "content": None, "refusal": "no"}, "stop", "no"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "stop", "no"),
        ({"role": "assistant", "content": "ye"}, "content_filter", "ye"),
        (None, "content_filter", ""),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "content_filter", ""),
    ],
)
def test_a_withheld_reply_is_a_reply_and_marked(message: Any, finish: str, text: str) -> None:
    """Its text is the refusal, or what the filter left; a call that the filter may have cut does not run."""
    answer, _ = answer_of(body(message, finish))
    assert isinstance(answer, Answer)
    read = answer.message
    assert (answer.withheld, answer.finish_reason) == (True, "stop")
    assert (read.text, list(read.tool_calls)) == (text, [])


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", Unreadable),
        (b"<html>", Unreadable),
        (b"[]", Unreadable),
        (b"{}", Unreadable),
        (body("yes"), Unreadable),
        (body({"role": "assistant"}), Unreadable),
        (body({"role": "user", "content": "yes"}), Unreadable),
        (body({"role": "assistant", "content": 5}), Unreadable),
        (body({"role": "assistant", "content": "yes"}, None), Unreadable),
        (body({"role": "assistant", "content": "yes"}, "error"), Unreadable),
        (body({"role": "assistant", "content": "yes"}, "tool_calls"), Unreadable),
        (body({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}), Unreadable),
        (body({"role": "assistant", "content": None, "refusal": {"text": "no"}}), Unreadable),
        (body("ye", "content_filter"), Unreadable),
        (body({"role": "assistant", "content": [{"type": "text", "text": "ye"}, {"type": "refusal"}]}), Unreadable),
        (msgspec.json.encode({"error": {"message": "m", "code": 502}}), EndpointUnavailable),
        (msgspec.json.encode({"error": {"message": "m", "code": 400}}), EndpointRefused),
        (msgspec.json.encode({"error": "m"}), EndpointUnavailable),
        (msgspec.json.encode({"choices": [{"error": {"message": "m", "code": 502}}]}), EndpointUnavailable),
        (msgspec.json.encode({"choices": [{}, {}]}), Unreadable),
    ],
)
def test_a_body_that_is_no_whole_reply_is_an_error(payload: bytes, kind: type[Exception]) -> None:
    """With its type, whatever the bytes are; none of them is a reply with empty text."""
    answer, _ = answer_of(payload)
    assert type(answer) is kind


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 2}, (3, 2, 0, 0, None)),
        (
            {
                "prompt_tokens": 3, "completion_tokens": 2, "cost": 0.5, "prompt_tokens_details": {"cached_tokens": 1},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            (3, 2, 1, 2, 0.5),
        ),
        ({"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None, "cost": -1}, (3, 2, 0, 0, None)),
        ({"prompt_tokens": "3", "completion_tokens": 2}, None),
        ({"prompt_tokens": -1, "completion_tokens": 2}, None),
        (None, None),
    ],
)  # fmt: skip
def test_a_usage_is_counted_or_unknown(usage: Any, expected: Any) -> None:
    """Numbers of another form are not counted."""
    _, found = answer_of(body({"role": "assistant", "content": "yes"}, usage=usage))
    got = None if found is None else (found.prompt, found.completion, found.cached, found.reasoning, found.cost)
    assert got == expected


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "m", "code": "context_length_exceeded"}, ContextOverflow),
        (400, {"message": "This model's maximum context length is 8192 tokens."}, ContextOverflow),
        (400, {"message": "maximum context length is 9 tokens; you requested 8 output tokens"}, RoomExceeded),
        (400, {"message": "m", "code": "content_policy_violation"}, ReplyWithheld),
        (400, {"message": "m", "code": "content_filter"}, ReplyWithheld),
        (400, {"message": "Invalid schema"}, EndpointRefused),
        (422, {"message": "m"}, EndpointRefused),
        (409, {"message": "m"}, EndpointUnavailable),
        (529, {"message": "overloaded"}, EndpointUnavailable),
        (500, {"message": "maximum context length"}, EndpointUnavailable),
    ],
)
def test_an_error_has_the_type_of_its_status_and_code(status: int, error: Any, kind: type[Exception]) -> None:
    assert type(error_of(status, msgspec.json.encode({"error": error}))) is kind
