"""Fields of requests are honoured, refused, counted, or known to have no effect; answers have the ids asked for."""

from __future__ import annotations

import importlib
import typing
from typing import Any

import pytest

from rollouts.dtypes import Message
from rollouts.programs.gateway import chat, messages, responses
from rollouts.programs.gateway.types import ApiError, CallReply, Sampled, Usage
from rollouts.programs.gateway.wire import Wire, decoded_body, encoded
from rollouts.testing.policy import ScriptedPolicy
from tests.programs.gateway.programs import demo_renderer, replies, session_of
from tests.programs.gateway.scripted import data_of, named_events

PUBLISHED: dict[str, tuple[Wire, str]] = {
    "chat": (
        chat,
        "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages"
        " metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key"
        " prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed"
        " service_tier stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity"
        " web_search_options",
    ),
    "responses": (
        responses,
        "access_programs background background_options context_management conversation image include input instructions"
        " max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt"
        " prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store"
        " stream stream_options temperature text tool_choice tools top_logprobs top_p truncation user",
    ),
    "messages": (
        messages,
        "betas billing_policy cache_control compaction container context_management diagnostics fallback_credit_token"
        " fallbacks inference_geo max_tokens mcp_servers messages metadata model output_config service_tier speed"
        " stop_sequences stream system temperature thinking thread tool_choice tools top_k top_p user_profile_id"
        " workspace_id",
    ),
}
"""The fields of a request in the types of the SDKs openai 3.57.0 and anthropic 2.14.0, and older ones of Messages."""
SERVERS = (
    "add_generation_prompt best_of chat_template_kwargs continue_final_message echo ebnf enable_thinking guided_json"
    " guided_regex ignore_eos include_stop_str_in_output min_p min_tokens prompt_logprobs regex repetition_penalty"
    " return_token_ids stop_token_ids structured_outputs think top_k truncate_prompt_tokens"
)
"""Fields that the chat servers of SGLang, vLLM and Ollama take beyond the API."""
TYPES = [
    ("chat", "openai.types.chat.completion_create_params", "CompletionCreateParamsStreaming"),
    ("responses", "openai.types.responses.response_create_params", "ResponseCreateParamsStreaming"),
    ("messages", "anthropic.types.message_create_params", "MessageCreateParamsStreaming"),
    ("messages", "anthropic.types.beta.message_create_params", "MessageCreateParamsStreaming"),
]


def entries(wire: Wire) -> set[str]:
    return {wire.HISTORY, "tools", *wire.FIELDS, *wire.NO_EFFECT}


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_published_field_has_an_entry(name: str) -> None:
    """A field without one would be counted as unknown: the next version of an API is noticed in the metrics."""
    wire, fields = PUBLISHED[name]
    assert set(fields.split()) - entries(wire) == set()
    assert set(wire.FIELDS) & set(wire.NO_EFFECT) == set()


def test_each_field_of_the_servers_has_an_entry() -> None:
    """Of SGLang, vLLM and Ollama, in the chat API."""
    assert set(SERVERS.split()) - entries(chat) == set()


@pytest.mark.extra
@pytest.mark.parametrize(("name", "module", "type_name"), TYPES)
def test_the_types_of_the_sdks_have_no_other_field(name: str, module: str, type_name: str) -> None:
    """The installed SDK is walked, in place of the stored names."""
    pytest.importorskip(module.partition(".")[0])
    fields = set(typing.get_type_hints(getattr(importlib.import_module(module), type_name)))
    assert fields - entries(PUBLISHED[name][0]) == set()


@pytest.mark.parametrize("value", [b'{"a": [1]}', b"1", b'"text"', b"true"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_unknown_field_is_counted_by_name(name: str, value: bytes) -> None:
    """Whatever its value, unless it is null; its value is not decoded."""
    wire = PUBLISHED[name][0]
    body = b'{"max_tokens": 5, "%b": [{"role": "user", "content": "x"}], "new": %b, "old": null}'
    request = wire.read(decoded_body(body % (wire.HISTORY.encode(), value), wire.HISTORY, wire.FIELDS))
    unknown = {count: amount for count, amount in request.counts.items() if "max_tokens" not in count}
    assert unknown == {"unknown_field/new": 1}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot"}, {"top_p": True}, {"top_k": 1.5}, {"seed": "7"}, {"logit_bias": [1]},
        {"presence_penalty": {}}, {"min_p": []},
    ],
)  # fmt: skip
def test_a_sampling_parameter_of_a_wrong_type_is_refused(name: str, fields: dict[str, Any]) -> None:
    """Although the parameters of the run replace it; the message has its path."""
    wire = PUBLISHED[name][0]
    body = {"max_tokens": 5, wire.HISTORY: [{"role": "user", "content": "x"}]}
    with pytest.raises(ApiError, match=next(iter(fields))):
        wire.read({**body, **fields})


async def test_an_unknown_previous_response_is_counted_as_refused() -> None:
    """As each other field that is answered with 400."""
    async with session_of(ScriptedPolicy(replies())) as session:
        request = responses.read({"input": "x", "previous_response_id": "resp_none"})
        with pytest.raises(ApiError, match="previous_response_id"):
            await session.call(request, lineage={})
        assert session.counts == {"refused/invalid_request": 1}


# -- logprobs and ids --------------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
THOUGHT = Message("assistant", "It is hot.", reasoning="Hm, it is hot?")


async def _asked(wire: Wire, body: dict[str, Any]) -> tuple[Any, list[bytes], list[int], list[int], list[float]]:
    """The answer and the events of a request; the ids of its prompt, its sampled ids and their logprobs."""
    policy = ScriptedPolicy(replies(THOUGHT))
    async with session_of(policy) as session:
        request = wire.read(body)
        got = await session.call(request, lineage={})
        (call,) = session.tree.calls
        completion = call.completion
        encoded(wire.answer(request, got))
        answer, events = wire.answer(request, got), wire.events(request, got)
        return answer, events, policy.requests[0].tolist(), completion.tokens.tolist(), completion.logprobs.tolist()


async def test_chat_serves_logprobs_and_ids() -> None:
    """Of all sampled ids, as vLLM does; the texts of the ids are those of the reply with its marks."""
    body = {**CHAT, "logprobs": True, "return_token_ids": True}
    answer, events, prompt, ids, logprobs = await _asked(chat, body)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert (answer["prompt_token_ids"], choice["token_ids"]) == (prompt, ids)
    assert [entry["logprob"] for entry in content] == logprobs
    assert "".join(entry["token"] for entry in content) == demo_renderer().decode(ids)
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == demo_renderer().decode(ids)
    chunks = data_of(b"".join(events))[:-1]
    assert chunks[0]["prompt_token_ids"] == prompt
    pieces = [one for chunk in chunks for one in chunk["choices"]]
    assert [one["token_ids"] for one in pieces if "token_ids" in one] == [ids]
    assert [one["logprobs"]["content"] for one in pieces if one["logprobs"] is not None] == [content]


async def test_chat_serves_what_was_asked_only() -> None:
    """Neither by default; one of both where one is asked."""
    plain, *_ = await _asked(chat, CHAT)
    assert plain["choices"][0]["logprobs"] is None
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    ids, *_ = await _asked(chat, {**CHAT, "return_token_ids": True})
    assert ids["choices"][0]["logprobs"] is None
    logprobs, *_ = await _asked(chat, {**CHAT, "logprobs": True})
    assert "token_ids" not in logprobs["choices"][0]


async def test_responses_serves_the_logprobs_of_the_text() -> None:
    """Of the ids of the text alone, although the thought has the same words."""
    body = {"input": "Hi", "include": ["message.output_text.logprobs"]}
    answer, events, _, ids, logprobs = await _asked(responses, body)
    found = next(item for item in answer["output"] if item["type"] == "message")["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in found).strip() == "It is hot."
    (start,) = [at for at in range(len(ids)) if logprobs[at : at + len(found)] == [one["logprob"] for one in found]]
    assert start > ids.index(demo_renderer().encode("</think>").tolist()[0])
    streamed = [data for name, data in named_events(b"".join(events)) if name == "response.output_text.done"]
    assert [one["logprobs"] for one in streamed] == [found]


def test_logprobs_of_texts_that_are_not_the_reply() -> None:
    """A character of two ids: then the logprobs of all ids are served, and the bytes of these ids are null."""
    sampled = Sampled([1], [2, 3], [-0.5, -0.25], ["\ufffd", "\ufffd"])
    reply = CallReply("r1", Message("assistant", "\u00e9"), "stop", Usage(1, 2), sampled=sampled)
    request = responses.read({"input": "Hi", "include": ["message.output_text.logprobs"]})
    (item,) = responses.answer(request, [reply])["output"]
    assert [(one["logprob"], one["bytes"]) for one in item["content"][0]["logprobs"]] == [(-0.5, None), (-0.25, None)]
