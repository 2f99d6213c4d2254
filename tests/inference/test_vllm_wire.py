"""vLLM's format: requests, the proofs in a response, and the logprobs of each mode."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollouts.dtypes import SamplingParams, VersionSpan
from rollouts.errors import ConfigError, ContextOverflow, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import ExtrasRequest
from rollouts.inference.completions import BrokenNumbers, SentRequest
from rollouts.inference.token_json import EncodedIds
from rollouts.inference.vllm_wire import (
    LogprobsMode,
    check_mode,
    mode_of,
    probed_logprob,
    read_completion,
    request_body,
    request_options,
)
from rollouts.inference.wire_errors import error_of

IDS = EncodedIds((b"1,2,", b"3,4,5"), 5, 0)
CONTENT = [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in ((7, -0.5), (8, -1.5), (9, 0))]


def reply(*, content: Any = CONTENT, choices: Any = None, spaces: bool = False, **changes: Any) -> bytes:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [7, 8, 9],
        "logprobs": {"content": content},
        "weight_versions": [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 3}],
    }
    whole = {
        "request_id": "generate-tokens-r",
        "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
        "prompt_token_ids": [1, 2, 3, 4, 5],
    }
    whole |= {name: value for name, value in changes.items() if name in whole}
    choice |= {name: value for name, value in changes.items() if name not in whole}
    encoded = msgspec.json.encode(whole | {"choices": [choice] if choices is None else choices})
    return msgspec.json.format(encoded) if spaces else encoded


def read(payload: bytes, **options: Any) -> Any:
    return read_completion(payload, SentRequest("r", IDS, **options))


# -- requests ---------------------------------------------------------------------------------------------------------


def test_the_body_has_every_field_that_vllm_would_fill_by_itself() -> None:
    """Budget and stop ids are always named, nothing is null, and the reply is to repeat the prompt ids."""
    options = request_options(SamplingParams(max_new_tokens=9), ())
    body, start = request_body("r", IDS, options)
    assert msgspec.json.decode(body) == {
        "request_id": "r",
        "token_ids": [1, 2, 3, 4, 5],
        "return_token_ids": True,
        "stream": False,
        "sampling_params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 9, "stop_token_ids": [],
            "logprobs": 0, "skip_special_tokens": False, "include_stop_str_in_output": True,
        },
    }  # fmt: skip
    assert body[start:].startswith(b"1,2,3,4,5]")


def test_the_body_has_vllms_names_for_all_parameters() -> None:
    """A namespace becomes ``cache_salt``; a greedy request names no truncation, which vLLM would ignore."""
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, max_new_tokens=9, stop=["x"], seed=3, min_new_tokens=2,
        repetition_penalty=1.5,
    )  # fmt: skip
    body = msgspec.json.decode(request_body("r", IDS, request_options(sampling, (8, 9)), "v1")[0])
    assert body["cache_salt"] == "v1"
    assert body["sampling_params"] == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "max_tokens": 9, "stop_token_ids": [8, 9],
        "logprobs": 0, "skip_special_tokens": False, "include_stop_str_in_output": True, "stop": ["x"], "seed": 3,
        "min_tokens": 2, "repetition_penalty": 1.5,
    }  # fmt: skip
    for greedy in (SamplingParams(temperature=0, top_p=0.5), SamplingParams(top_k=1)):
        params = msgspec.json.decode(request_body("r", IDS, request_options(greedy, ()))[0])["sampling_params"]
        assert params["temperature"] == 0
        assert not {"top_p", "top_k", "min_p"} & set(params)


@pytest.mark.parametrize(
    ("sampling", "options", "message"),
    [
        (SamplingParams(temperature=2.5), {}, r"SamplingParams.temperature: got 2.5; expected at most 2"),
        (SamplingParams(seed=2**63), {}, r"SamplingParams.seed: got \d+; expected an integer of 64 bits"),
        (SamplingParams(), {"top_p_sets": True}, r"ExtrasRequest.top_p_sets: got True; expected False"),
    ],
)
def test_what_vllm_cannot_express_is_refused(sampling: SamplingParams, options: Any, message: str) -> None:
    """Before anything is sent, by name."""
    with pytest.raises(ConfigError, match=message):
        request_options(sampling, (), **options)
    with pytest.raises(ConfigError, match=r"ExtrasRequest.experts_width: got 8; expected None"):
        request_body("r", IDS, b"", extras=ExtrasRequest(experts_width=8))


# -- responses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spaces", [False, True])
def test_a_reply_becomes_a_completion(spaces: bool) -> None:
    """Ids, logprobs, version spans and counts; white space in the ids of the prompt does not matter."""
    completion = read(reply(spaces=spaces), extras=ExtrasRequest(), seconds=1.5)
    assert completion.tokens.tolist() == [7, 8, 9]
    assert completion.logprobs.tolist() == [-0.5, -1.5, 0.0]
    assert completion.versions == (VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 3))
    assert (completion.finish_reason, completion.request_id, completion.cached_tokens) == ("stop", "r", 4)
    assert completion.extras.requests[0]["completion_tokens"] == 3


def test_a_request_that_was_aborted_in_the_queue_has_no_tokens() -> None:
    """It lacks versions, too, and need not repeat the prompt."""
    empty = reply(content=[], token_ids=[], finish_reason="abort", weight_versions=[], prompt_token_ids=None)
    completion = read(empty)
    assert (len(completion.tokens), completion.finish_reason, completion.versions) == (0, "abort", ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": None}, "prompt_token_ids: got none; expected the ids that were sent"),
        ({"prompt_token_ids": [1, 2, 9, 4, 5]}, "prompt_token_ids: got 5 ids, which differ from position 2"),
        ({"prompt_token_ids": [1, 2]}, "prompt_token_ids: got 2 ids, which differ from position 2; expected the 5"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids are not a list of ids"),
        ({"request_id": "r"}, "request_id: got 'r'; expected 'generate-tokens-r'"),
        ({"token_ids": [7, 8, 8]}, "got 3 token_ids and logprobs of 3 ids; expected a logprob of each id"),
        ({"token_ids": None}, "got no token_ids and logprobs of 3 ids"),
        ({"logprobs": None}, "got 3 token_ids and logprobs of 0 ids"),
        ({"weight_versions": None}, "weight_versions: got none; expected the version of each token, as vLLM 0.32"),
        ({"weight_versions": [{"version": "v1", "start": 0, "end": 2}]}, "weight_versions: "),
        ({"finish_reason": "repetition"}, "finish_reason: got 'repetition'; expected stop, length or abort"),
        ({"choices": [{"finish_reason": "stop"}] * 2}, "choices: got 2; expected 1"),
        ({"choices": []}, "not a response of vLLM's /inference/v1/generate"),
        ({"content": [{"token_id": 7, "logprob": 0.5, "rank": 1}], "token_ids": [7]}, r"content\[0\]: got 0.5"),
    ],
)
def test_a_reply_that_proves_too_little_is_refused(changes: Any, message: str) -> None:
    """A field that vanished on its way, other ids, or a form of another version of vLLM: never stored."""
    with pytest.raises(EndpointRefused, match=message):
        read(reply(**changes))


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    """The tokenizer belongs to another model."""
    with pytest.raises(EndpointRefused, match=r"token_ids\[2\]: got id 9; expected 0 <= id < 9"):
        read(reply(), vocab_size=9)


@pytest.mark.parametrize(
    "token", [{"logprob": -9999.0, "rank": None}, {"logprob": -9999.0, "rank": 1}, {"logprob": -1.0, "rank": None}]
)
def test_numbers_that_stand_for_nan_are_broken(token: dict[str, Any]) -> None:
    """vLLM never says NaN: it answers 200 with a logprob of -9999 and no rank."""
    with pytest.raises(BrokenNumbers, match=r"content\[0\]: got logprob -.*the model computed NaN"):
        read(reply(content=[{"token_id": 7, **token}], token_ids=[7]))


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (
            400,
            "The decoder prompt (length 1025) is longer than the maximum model length of 1024. Make",
            ContextOverflow,
        ),
        (
            400,
            "The decoder prompt (length 1024) plus the number of requested output tokens (at least 1) is longer than"
            " the maximum model length of 1024. Make sure",
            ContextOverflow,
        ),
        (400, "Token id 509 is out of vocabulary", EndpointRefused),
        (503, "Generation is paused. Please retry after it resumes.", EndpointUnavailable),
    ],
)
def test_the_errors_of_vllm_are_known(status: int, message: str, kind: type[Exception]) -> None:
    """A prompt that does not fit, in both sentences, ends a rollout; a pause is waited for."""
    assert type(error_of(status, message)) is kind or isinstance(error_of(status, message), kind)


# -- modes of logprobs ------------------------------------------------------------------------------------------------


def test_two_certain_ids_prove_processed_logprobs() -> None:
    """Only after processing can two different ids both be certain; a model that is certain of one id proves nothing."""
    assert mode_of(0.0, 0.0, -0.3) == "processed"
    assert mode_of(0.0, -9999.0, 0.0) == "raw"
    assert mode_of(-6.0, -7.0, -0.3) == "raw"
    with pytest.raises(EndpointRefused, match=r"--logprobs-mode: a logprob of 12.5 came; expected at most 0"):
        mode_of(-6.0, -7.0, 12.5)
    with pytest.raises(EndpointRefused, match="--logprobs-mode: got 0 logprobs; expected the logprob of one id"):
        probed_logprob(reply(content=[], token_ids=[]))


@pytest.mark.parametrize(
    ("params", "modes"),
    [
        ({}, ["raw", "processed"]),
        ({"temperature": 0}, ["raw", "processed"]),
        ({"temperature": 0, "top_p": 0.5}, ["raw", "processed"]),
        ({"temperature": 0.7, "top_k": 1}, ["raw", "processed"]),
        ({"temperature": 0.7}, ["processed"]),
        ({"repetition_penalty": 1.5}, ["processed"]),
        ({"top_p": 0.9}, ["raw"]),
        ({"top_k": 3}, ["raw"]),
        ({"min_p": 0.1}, ["raw"]),
        ({"temperature": 0.7, "top_p": 0.9}, []),
    ],
)
def test_a_mode_is_refused_where_its_logprobs_are_of_another_distribution(params: Any, modes: list[str]) -> None:
    """A stored logprob is tempered and penalised, and not truncated: as SGLang's."""
    sampling = SamplingParams(**params)
    accepted = []
    both: tuple[LogprobsMode, ...] = ("raw", "processed")
    for mode in both:
        try:
            check_mode(mode, sampling, "http://h")
            accepted.append(mode)
        except ConfigError as error:
            assert "--logprobs-mode" in str(error)  # noqa: PT017 - one of two outcomes
    assert accepted == modes
