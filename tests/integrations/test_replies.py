"""A policy over the inference engine of a trainer: what each of them checks in requests and replies."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from rollouts.dtypes import ImageSpan, SamplingParams, TokenColumn, packed_tokens
from rollouts.errors import ConfigError, ContextOverflow, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import CompletionRequest
from rollouts.integrations.replies import Reply, TrainerPolicy
from rollouts.trajectory import digest
from tests.processors import picture

PROMPT = packed_tokens([1, 2, 3])


class Engine(TrainerPolicy):
    """A trainer's engine that returns one reply, and keeps its request."""

    trainer = "It"
    unsupported = ("seed",)
    max_context = 16

    def __init__(self, **fields: Any) -> None:
        self.reply = Reply(**{"tokens": [7, 8], "logprobs": [-0.5, -1], "stopped_by": "stop", "version": 4, **fields})
        self.asked: Any = None

    async def sample(
        self, tokens: TokenColumn, sampling: SamplingParams, stop_token_ids: tuple[int, ...], session: str
    ) -> Reply:
        self.asked = (tokens.tolist(), sampling.max_new_tokens, stop_token_ids, session)
        return self.reply


async def test_a_reply_is_a_completion_of_its_prompt() -> None:
    """With ids, logprobs, versions and the digest of what was sent; requests of a route have its name."""
    engine = Engine(cached_tokens=2, seconds=0.5)
    sampling = SamplingParams(max_new_tokens=5)
    done = await engine.complete(CompletionRequest(PROMPT, sampling, stop_token_ids=(9,), session="s", route="r"))
    assert engine.asked == ([1, 2, 3], 5, (9,), "r")
    assert (done.tokens.tolist(), done.logprobs.tolist(), done.finish_reason) == ([7, 8], [-0.5, -1.0], "stop")
    assert (done.prompt_tokens, done.prompt_digest) == (3, digest(PROMPT))
    assert (done.cached_tokens, done.seconds) == (2, 0.5)
    assert [attrs.astuple(span) for span in done.versions] == [("4", 0, 2)]


async def test_images_are_refused_where_the_request_has_no_place_for_them() -> None:
    """Before it is sent."""
    engine = Engine()
    with pytest.raises(ConfigError, match=r"images: .*expected none: requests of this policy have no images"):
        await engine.complete(
            CompletionRequest(PROMPT, SamplingParams(max_new_tokens=5), images=[ImageSpan(picture(4, 3), 0, 1)])
        )
    assert engine.asked is None


async def test_each_token_has_its_version() -> None:
    """An engine that resumes a reply across an update names one for each."""
    done = await Engine(tokens=[5, 6, 7], logprobs=[-1] * 3, version=[3, 3, 4]).complete(
        CompletionRequest(PROMPT, SamplingParams(max_new_tokens=5))
    )
    assert [attrs.astuple(span) for span in done.versions] == [("3", 0, 2), ("4", 2, 3)]


@pytest.mark.parametrize(
    ("stopped_by", "budget", "expected"),
    [
        ("stop", 2, "stop"),
        ("length", 5, "length"),
        ("completed", 2, "length"),
        (None, 5, "stop"),
        ("abort", 5, "abort"),
    ],
)
async def test_a_reply_as_long_as_its_budget_was_cut(stopped_by: str | None, budget: int, expected: str) -> None:
    """Unless the engine says that it stopped there."""
    done = await Engine(stopped_by=stopped_by).complete(
        CompletionRequest(PROMPT, SamplingParams(max_new_tokens=budget))
    )
    assert done.finish_reason == expected


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"tokens": []}, EndpointUnavailable, "It returned 0 tokens, stop reason 'stop'"),
        ({"logprobs": None}, EndpointRefused, "It returned 2 tokens and no logprobs; expected one for each"),
        ({"logprobs": [-1.0]}, EndpointRefused, "2 tokens and 1 logprobs"),
        ({"logprobs": [0.5, -1.0]}, EndpointRefused, "It: a sampled token came without a finite logprob"),
    ],
)
async def test_a_bad_reply_is_an_error(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    """No token is worth another try, logprobs that do not fit are not."""
    with pytest.raises(error, match=words):
        await Engine(**fields).complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=5)))


async def test_a_request_that_does_not_fit_is_not_sent() -> None:
    """A parameter without a field, or more tokens than the context has."""
    engine = Engine()
    with pytest.raises(ConfigError, match=r"SamplingParams\.seed: got 1; expected None: It has no field for it"):
        await engine.complete(CompletionRequest(PROMPT, SamplingParams(seed=1)))
    with pytest.raises(ContextOverflow, match="3 prompt tokens and max_new_tokens=14 exceed the context of 16"):
        await engine.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=14)))
    assert (engine.asked, (await engine.describe()).max_context) == (None, 16)
