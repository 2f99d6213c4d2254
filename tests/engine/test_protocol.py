"""The four shapes of an error, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

IDS = {"input_ids": [1, 2, 3]}


def message(answer: Any) -> str:
    """Of the shape ``{"error": {"message": …}}``."""
    assert list(answer) == ["error"]
    assert list(answer["error"]) == ["message"]
    return str(answer["error"]["message"])


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2**63}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 2}, "n"),
        ({"n": 10**9}, "n"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens"),
        ({"sampling_seed": 2**64}, "sampling_seed"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop_token_ids": [509]}, "stop_token_ids"),
        ({"logit_bias": {"509": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"stream_interval": 4}, "stream_interval"),
        ({"custom_params": {"a": 1}}, "custom_params"),
    ],
)
async def test_a_bad_sampling_value_is_an_error_with_a_message(
    client: Any, sampling: dict[str, Any], named: str
) -> None:
    """The message names the parameter; nothing is silently ignored. Hardening 16: ``n`` beyond what memory holds."""
    status, answer = await client.post("/generate", **IDS, sampling_params=sampling)
    assert status == 400
    assert named in message(answer)


@pytest.mark.parametrize(
    "prompt", [{}, {"input_ids": []}, {"input_ids": [[1], []]}, {"text": ""}, {"text": "a", "input_ids": [1]}]
)
async def test_no_prompt_or_two_is_an_error_with_a_message(client: Any, prompt: dict[str, Any]) -> None:
    """Exactly one of text and ids, and not empty."""
    status, answer = await client.post("/generate", **prompt, sampling_params={})
    assert status == 400
    assert message(answer)


async def test_an_unknown_sampling_key_is_an_error_that_is_a_string(client: Any) -> None:
    """``error`` is then a string; it names the key and the accepted ones."""
    status, answer = await client.post("/generate", **IDS, sampling_params={"max_tokens": 5})
    assert status == 400
    assert isinstance(answer["error"], str)
    assert "max_tokens" in answer["error"]
    assert "max_new_tokens" in answer["error"]


@pytest.mark.parametrize(
    ("name", "neutral", "value"),
    [
        ("top_logprobs_num", 0, -1),
        ("token_ids_logprob", None, [1]),
        ("return_hidden_states", False, True),
        ("return_sampling_mask", False, True),
        ("input_embeds", None, [[0.5]]),
        ("session_params", {}, {"id": "a"}),
        ("cache_salt", None, "salt"),
        ("custom_logit_processor", None, "code"),
        ("sampling_logprobs_mode", None, "raw"),
    ],
)
async def test_a_field_that_is_not_served_is_refused_by_name(client: Any, name: str, neutral: Any, value: Any) -> None:
    """A field that changes the reply on SGLang is accepted with its neutral value only."""
    sampling = {"max_new_tokens": 1}
    await client.generate(**IDS, sampling_params=sampling, **{name: neutral})
    status, answer = await client.post("/generate", **IDS, sampling_params=sampling, **{name: value})
    assert status == 400
    assert name in message(answer)


async def test_an_unknown_key_of_the_body_is_ignored(client: Any) -> None:
    """As SGLang ignores what an older version of it does not know."""
    await client.generate(**IDS, sampling_params={"max_new_tokens": 1}, return_routed_experts=True, no_such_key=1)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"input_ids": "1"}', b'{"input_ids": [1], "stream": 3}', b'{"input_ids": [1, [2]]}']
)
async def test_a_body_that_cannot_be_read_is_a_bad_request_object(client: Any, body: bytes) -> None:
    """Malformed JSON and wrong types have the shape of the OpenAI API."""
    status, answer = await client.post("/generate", body)
    assert status == 400
    assert answer.pop("message")
    assert answer == {"object": "error", "type": "Bad Request", "param": None, "code": 400}


@pytest.mark.parametrize("length", [64, 70])
async def test_a_prompt_that_fills_the_context_is_refused(serving: Callable[..., Any], length: int) -> None:
    """A prompt of exactly the context's length is too long already."""
    async with serving(max_context=64) as client:
        status, answer = await client.post("/generate", input_ids=[1] * length)
    assert status == 400
    assert message(answer) == f"The input ({length} tokens) is longer than the model's context length (64 tokens)."


@pytest.mark.parametrize("length", [58, 63])
async def test_a_prompt_needs_6_tokens_of_the_context(serving: Callable[..., Any], length: int) -> None:
    """SGLang reserves 6 tokens of the context, and ``/server_info`` has the resulting limit."""
    async with serving(max_context=64, slots=3) as client:
        status, answer = await client.post("/generate", input_ids=[1] * length, sampling_params={"max_new_tokens": 1})
        fits, _ = await client.post("/generate", input_ids=[1] * 57, sampling_params={"max_new_tokens": 1})
        _, info = await client.get("/server_info")
    assert (status, fits) == (400, 200)
    assert message(answer) == (
        f"Input length ({length} tokens) exceeds the maximum allowed length (58 tokens)."
        " Use a shorter input or enable --allow-auto-truncate."
    )
    assert (info["max_req_input_len"], info["max_total_num_tokens"]) == (58, 3 * 64)


async def test_a_reply_gets_2_tokens_less_than_the_context_has(serving: Callable[..., Any]) -> None:
    """A budget up to the end of the context is cut by 2, and the finish reason has the cut budget."""
    sampling = {"max_new_tokens": 24, "ignore_eos": True}
    async with serving(max_context=64) as client:
        answer = await client.generate(input_ids=[1] * 40, sampling_params=sampling)
    assert len(answer["output_ids"]) == 22
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 22}


async def test_a_budget_beyond_the_context_is_refused_and_not_clamped(serving: Callable[..., Any]) -> None:
    """The error reports that prompt and budget do not fit together."""
    async with serving(max_context=64) as client:
        status, answer = await client.post("/generate", input_ids=[1] * 50, sampling_params={"max_new_tokens": 15})
        fits, _ = await client.post("/generate", input_ids=[1] * 50, sampling_params={"max_new_tokens": 14})
    assert (status, fits) == (400, 200)
    assert message(answer).startswith("Requested token count exceeds the model's maximum context length")


@pytest.mark.parametrize("token", [-1, 509, 10**9])
async def test_an_id_outside_the_vocabulary_is_refused(client: Any, token: int) -> None:
    """SGLang crashes; this engine answers and continues."""
    status, answer = await client.post("/generate", input_ids=[1, token])
    assert status == 400
    assert str(token) in message(answer)
    assert (await client.get("/health"))[0] == 200


async def test_errors_of_a_stream_come_with_status_200(client: Any) -> None:
    """One event with the error, then the end: a client that reads the status only sees nothing."""
    events = [event async for event in client.stream(input_ids=[])]
    error = events[0]["error"]
    assert error.pop("message")
    assert error == {"type": "invalid_request_error", "code": 400, "retryable": False}
    assert events[1:] == ["[DONE]"]


async def test_a_full_queue_is_503(serving: Callable[..., Any]) -> None:
    """The fourth shape; in a stream it is an ordinary event of type abort."""
    async with serving(max_queued=0) as client:
        status, answer = await client.post("/generate", **IDS)
        events = [event async for event in client.stream(**IDS)]
    assert status == 503
    assert answer == {
        "object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503,
    }  # fmt: skip
    assert events[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert events[0]["meta_info"]["finish_reason"]["status_code"] == 503
