"""The Responses API: every item of a request, and answers of every form."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.programs.gateway import responses
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest
from rollouts.programs.gateway.wire import encoded
from tests.programs.gateway.scripted import REPLIES, data_of, named_events

ASKED = {"model": "m", "input": "hi"}


def read(**fields: Any) -> CallRequest:
    return responses.read({**ASKED, **fields})


def items(*given: dict[str, Any]) -> tuple[Message, ...]:
    return read(input=[*given]).messages


def call(number: int, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{number}", "call_id": f"c{number}", "name": "f", "arguments": arguments}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def test_the_messages_of_a_request_are_read() -> None:
    """Instructions come first; developer is system; an item without type is a message; content is text or parts."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    request = read(
        instructions="be good",
        input=[
            {"type": "message", "role": "developer", "content": parts},
            {"role": "system", "content": "c"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "d"},
        ],
    )
    assert request.messages == (
        Message("system", "be good"),
        Message("system", "a\nb"),
        Message("system", "c"),
        Message("user", "a\nb"),
        Message("assistant", "d"),
    )
    assert request.instructions == "be good"
    assert read().messages == (Message("user", "hi"),)


def test_the_items_of_a_reply_are_one_message() -> None:
    """Reasoning, text and calls that follow each other; the results are separate messages."""
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "out"}]}
    calls = [ToolCall("f", {"x": 1}, "c1"), ToolCall("f", {}, "c2")]
    assert items(thought("hm"), said("I look."), call(1, '{"x":1}'), call(2), result) == (
        Message("assistant", "I look.", calls, reasoning="hm"),
        Message("tool", "out", tool_call_id="c1"),
    )


def test_two_replies_in_sequence_are_two_messages() -> None:
    """Reasoning and text stand before calls: what comes after them begins another reply."""
    assert items(said("a"), said("b")) == (Message("assistant", "a"), Message("assistant", "b"))
    assert items(call(1), thought("hm"), said("b")) == (
        Message("assistant", "", [ToolCall("f", {}, "c1")]),
        Message("assistant", "b", reasoning="hm"),
    )
    assert items(thought("x"), thought("y")) == (
        Message("assistant", reasoning="x"),
        Message("assistant", reasoning="y"),
    )


def test_reasoning_is_its_content_before_its_summary() -> None:
    """The content is what the model wrote."""
    content = [{"type": "reasoning_text", "text": "long"}]
    assert items({**thought("short"), "content": content, "encrypted_content": "r1", "id": "rs_r1"}) == (
        Message("assistant", reasoning="long"),
    )
    assert items({"type": "reasoning", "summary": [], "content": None}) == (Message("assistant", reasoning=""),)


def test_calls_of_other_tools_are_read() -> None:
    """Custom tools have a string as input, the local shell an action."""
    conversation = items(
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c2", "output": "out"},
    )
    assert conversation == (
        Message("assistant", "", [ToolCall("patch", {"input": "+x"}, "c1")]),
        Message("tool", "done", tool_call_id="c1"),
        Message("assistant", "", [ToolCall("local_shell", {"command": ["ls"]}, "c2")]),
        Message("tool", "out", tool_call_id="c2"),
    )


def test_malformed_arguments_are_kept_as_text() -> None:
    """A program that sends a malformed call back is not refused."""
    ((kept,),) = [message.tool_calls for message in items(call(1, "{bad"))]
    assert (kept.raw, kept.fault) == ("{bad", "not_json")


def test_a_reference_is_the_item_that_was_served() -> None:
    """The ids of the items of an answer find them again, each by itself."""
    reply = REPLIES["everything"]
    served = responses.answer(read(), [reply])["output"]
    references = [{"type": "item_reference", "id": item["id"]} for item in served]
    known: dict[str, CallReply] = {reply.id: reply}
    assert responses.read({"input": references}, known.get).messages == (reply.message,)


@pytest.mark.parametrize("item_id", ["rs_r2", "msg_r2", "fc_r1_2", "fc_r1", "fc_r1_²", "rs_r9", "", "r2"])
def test_an_unknown_reference_is_refused(item_id: str) -> None:
    """It is not found, as by the API: the session has no such item."""
    replies = {"r1": REPLIES["call"]}
    with pytest.raises(ApiError, match=r"input\[0\].id: got .* expected the id of an item of this session") as caught:
        responses.read({"input": [{"type": "item_reference", "id": item_id}]}, replies.get)
    assert caught.value.error_kind == "not_found"


def test_the_options_of_a_request_are_read() -> None:
    """Limits, stream, model and the reply that the input follows."""
    request = read(max_output_tokens=40, stream=True, previous_response_id="resp_r7", store=True)
    assert (request.max_tokens, request.stream, request.model, request.previous_response_id) == (40, True, "m", "r7")
    assert read(input=[], previous_response_id="resp_r7").messages == ()
    assert (read().max_tokens, read().stream, read().previous_response_id, read().instructions) == (None, False) + (
        None,
    ) * 2


def test_only_functions_are_offered() -> None:
    """Other kinds are counted by their type."""
    function = {"type": "function", "name": "f", "description": "d", "strict": False, "parameters": {"type": "object"}}
    others = [{"type": kind} for kind in ("namespace", "web_search", "custom", "web_search")]
    request = read(tools=[function, *others])
    assert request.tools == (Tool("f", "d", {"type": "object"}),)
    assert request.counts == {"server_tool/namespace": 1, "server_tool/web_search": 2, "server_tool/custom": 1}
    assert read(tools=[function], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"tool_choice": "required"}, ["not_enforced/tool_choice"]),
        ({"tool_choice": {"type": "function", "name": "f"}}, ["not_enforced/tool_choice"]),
        ({"text": {"format": {"type": "grammar"}}}, ["not_enforced/text.format"]),
        ({"parallel_tool_calls": False}, ["not_enforced/parallel_tool_calls"]),
        ({"top_logprobs": 2}, ["not_enforced/top_logprobs"]),
        ({"truncation": "auto"}, ["not_enforced/truncation"]),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, ["not_enforced/defer_loading"]),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, ["audio"]),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, ["file"]),
        (
            {
                "tool_choice": "auto",
                "text": {"format": {"type": "text"}, "verbosity": "low"},
                "include": ["reasoning.encrypted_content"],
                "reasoning": {"summary": "auto"},
                "prompt_cache_key": "k",
                "client_metadata": {},
                "store": False,
                "background": False,
                "truncation": "disabled",
                "top_logprobs": 0,
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
        ({"input": None}, "input: got None"),
        ({"input": []}, "input: got []"),
        ({"input": 3}, "input: got 3"),
        ({"input": ["x"]}, "input[0]: got 'x'"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type: got 'computer_call'"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role: got 'tool'"),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type: got 'x'"),
        ({"input": [{"type": "function_call"}]}, "input[0].name: got None"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].id: got None"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": {}}]}, "input[0].output: got {}"),
        ({"input": [{"type": "reasoning", "summary": [{}]}]}, "input[0].summary[0].text: got None"),
        ({"tools": [{"name": "f"}]}, "tools[0].type: got None"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name: got None"),
        ({"tool_choice": 3}, "tool_choice: got 3"),
        ({"max_output_tokens": -1}, "max_output_tokens: got -1"),
        ({"stream": 1}, "stream: got 1"),
        ({"previous_response_id": "x"}, "previous_response_id: got 'x'"),
        ({"previous_response_id": 3}, "previous_response_id: got 3"),
        ({"conversation": "conv_1"}, "conversation: got 'conv_1'"),
        ({"prompt": {"id": "p"}}, "prompt: got {'id': 'p'}"),
        ({"background": True}, "background: got True"),
        ({"instructions": []}, "instructions: got []"),
        ({"text": "x"}, "text: got 'x'"),
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
    """A reply with reasoning, text and two calls."""
    request = read(instructions="be good", previous_response_id="resp_r0")
    assert responses.answer(request, [REPLIES["everything"]]) == {
        "id": "resp_r1",
        "object": "response",
        "created_at": 1700000000,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "m",
        "output": [
            {
                "type": "reasoning",
                "id": "rs_r1",
                "summary": [{"type": "summary_text", "text": "Hm."}],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
                "encrypted_content": "r1",
                "status": "completed",
            },
            {
                "type": "message",
                "id": "msg_r1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {
                "type": "function_call",
                "id": "fc_r1_0",
                "call_id": "c00000001",
                "name": "bash",
                "arguments": '{"command":"ls"}',
                "status": "completed",
            },
            {
                "type": "function_call",
                "id": "fc_r1_1",
                "call_id": "c00000002",
                "name": "read",
                "arguments": '{"path":"a\\u2028b"}',
                "status": "completed",
            },
        ],
        "usage": {
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 60},
            "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 5},
            "total_tokens": 120,
        },
        "instructions": "be good",
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
        "reasoning": {},
        "store": False,
        "previous_response_id": "resp_r0",
    }


def test_a_cut_reply_is_incomplete() -> None:
    """The response says why, and its last item is incomplete."""
    whole = responses.answer(read(), [REPLIES["cut"]])
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][-1]["status"] == "incomplete"


def test_a_malformed_call_is_served_as_its_text() -> None:
    """The program sees what the model wrote, and reports it in its own way."""
    assert responses.answer(read(), [REPLIES["malformed call"]])["output"][-1]["arguments"] == "{bad"


@pytest.mark.parametrize("name", REPLIES)
def test_a_stream_is_the_answer_in_pieces(name: str) -> None:
    """Numbered events: the response under way, each item with its pieces between start and end, the whole response."""
    reply = REPLIES[name]
    whole = msgspec.json.decode(encoded(responses.answer(read(), [reply])))
    events = named_events(b"".join(responses.events(read(stream=True), [reply])))
    assert all(kind == data["type"] for kind, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    sent = [data for _, data in events]
    assert [each["type"] for each in sent[:2]] == ["response.created", "response.in_progress"]
    assert {each["response"]["status"] for each in sent[:2]} == {"in_progress"}
    assert sent[-1] == {"type": f"response.{whole['status']}", "response": whole, "sequence_number": len(sent) - 1}
    for index, item in enumerate(whole["output"]):
        of_item = [each for each in sent if each.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[0]["item"]["status"] == "in_progress"
        assert (of_item[-1]["type"], of_item[-1]["item"]) == ("response.output_item.done", item)
        assert all(each["item_id"] == item["id"] for each in of_item[1:-1])
        pieces = {each["type"].removeprefix("response."): each for each in of_item[1:-1]}
        if item["type"] == "function_call":
            assert list(pieces) == ["function_call_arguments.delta", "function_call_arguments.done"]
            assert pieces["function_call_arguments.delta"]["delta"] == item["arguments"]
            assert pieces["function_call_arguments.done"]["arguments"] == item["arguments"]
            continue
        text, part, parts, raw = (
            ("output_text", "content_part", item["content"], [])
            if item["type"] == "message"
            else (
                "reasoning_summary_text",
                "reasoning_summary_part",
                item["summary"],
                ["reasoning_text.delta", "reasoning_text.done"],
            )
        )
        expected = [f"{part}.added", f"{text}.delta", f"{text}.done", f"{part}.done", *raw]
        assert list(pieces) == [kind for kind in expected if parts[0]["text"] or kind != f"{text}.delta"]
        assert all(each.get("content_index", each.get("summary_index")) == 0 for each in pieces.values())
        assert {each["delta"] for kind, each in pieces.items() if kind.endswith(".delta")} <= {parts[0]["text"]}
        assert {each["text"] for kind, each in pieces.items() if kind.endswith("text.done")} == {parts[0]["text"]}
        assert (pieces[f"{part}.added"]["part"]["text"], pieces[f"{part}.done"]["part"]) == ("", parts[0])


@pytest.mark.parametrize("name", ["text", "thought", "call", "everything"])
def test_an_echo_is_read_as_the_reply(name: str) -> None:
    """The output of an answer, sent back, is the message of the reply."""
    output = responses.answer(read(), [REPLIES[name]])["output"]
    assert items(*output) == (REPLIES[name].message,)


def test_an_error_has_the_form_of_the_api() -> None:
    """Before a stream as in chat; in a stream as a response that failed, after its start."""
    failed = ApiError("server", "broken")
    body = {"message": "broken", "type": "server_error", "param": None, "code": None}
    assert responses.error(failed) == (500, {"error": body})
    created, ended = data_of(responses.error_event(read(), failed))
    assert (created["type"], created["response"]["status"], created["sequence_number"]) == (
        "response.created",
        "in_progress",
        0,
    )
    assert (ended["type"], ended["response"]["status"], ended["sequence_number"]) == ("response.failed", "failed", 1)
    assert ended["response"]["error"] == {"code": "server_error", "message": "broken"}
    _, overflow = data_of(responses.error_event(read(), ApiError("overflow", "", tokens=2, max_context=1)))
    assert overflow["response"]["error"]["code"] == "context_length_exceeded"
