"""The token laws: the stored ids are the ids that the policy was sent and sampled, and the mask marks the sampled ids.

Every test plays whole episodes with a real tokenizer and its real template. The model spells its replies in ids that no
tokenizer would choose, so the tests detect any text that is encoded twice.

1. Law 1: the ids of each request are a prefix of the ids stored.
2. Law 2: mask, logprobs and versions cover exactly the sampled tokens.
3. Law 3: each sampled token is stored once.
4. The same over HTTP: the ids that the server received are the stored ids.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts.agent import run_agent
from rollouts.dtypes import Completion, Endpoint, Limits, Message, Prompt, SamplingParams, StopReason, VersionSpan
from rollouts.engine import DEMO_MODEL
from rollouts.errors import TokenMismatchError
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer import load_tokenizer, renderer_for
from rollouts.runs.verify import check_sample
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.testing.server import StubServer
from rollouts.training import trajectory_to_sample
from rollouts.trajectory import Trajectory, digest
from tests.worlds import RandomWorld, Speller

TOKENIZERS = ["demo", "qwen3", "qwen2_5"]


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "demo":
        return load_tokenizer(DEMO_MODEL)
    return load_tokenizer(request.getfixturevalue("tokenizer_folder")(request.param))


def play(tokenizer: Any, seed: int, **limits: Any) -> tuple[Trajectory, ScriptedPolicy, list[list[int]]]:
    """Play one episode with random texts, random spelling and random cuts."""
    rng = random.Random(seed)
    renderer = renderer_for(tokenizer)
    speller = Speller(tokenizer, renderer.stop_token_ids[0], seed)
    replies: list[list[int]] = []

    def answer(tokens: Any) -> Reply:
        replies.append(speller.reply())
        middle = rng.randint(1, len(replies[-1]))
        spans = [VersionSpan("v1", 0, middle), VersionSpan("v2", middle, len(replies[-1]))]
        return Reply(replies[-1], versions=[span for span in spans if span.start < span.stop])

    policy = ScriptedPolicy(answer)
    sampling = SamplingParams(max_new_tokens=limits.pop("max_new_tokens", 4096))
    world = partial(RandomWorld, seed)
    run = partial(run_agent, sampling=sampling, limits=Limits(**{"max_turns": 6, **limits}))
    trajectory = anyio.run(run, Prompt(f"Question {seed}?", index=seed), world, policy, renderer)
    return trajectory, policy, replies


def assert_exact(trajectory: Trajectory, requests: list[np.ndarray], sampled: list[list[int]]) -> None:
    """Check laws 1 to 3 against the requests and replies of the policy."""
    stored = trajectory.tokens.tolist()
    mask = trajectory.mask
    expected = np.zeros(len(stored), bool)
    assert len(trajectory.completions) == len(requests) == len(sampled)
    for call, request, reply in zip(trajectory.completions, requests, sampled, strict=True):
        assert list(request) == stored[: call.start]
        assert reply[: call.stop - call.start] == stored[call.start : call.stop]
        assert not expected[call.start : call.stop].any()
        expected[call.start : call.stop] = True
    assert np.array_equal(expected, mask)
    assert (trajectory.logprobs[~mask] == 0).all()
    assert (trajectory.logprobs[mask] < 0).all()
    covered = np.zeros(len(stored), bool)
    for span in trajectory.versions:
        covered[span.start : span.stop] = True
    assert np.array_equal(covered, mask)


EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# -- 1, 2, 3 ----------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_random_conversations_are_stored_as_they_were_sampled(tokenizer: Any, seed: int) -> None:
    """Tools, parallel and broken calls, several user turns, odd spelling: nothing is encoded twice."""
    trajectory, policy, replies = play(tokenizer, seed)
    assert_exact(trajectory, policy.requests, replies)


@EXAMPLES
@given(seed=st.integers(0, 2**32), budget=st.integers(1, 40))
def test_cut_replies_keep_their_ids_and_their_closing_mark_is_not_trained(
    tokenizer: Any, seed: int, budget: int
) -> None:
    """A reply cut anywhere, also inside a character, stays unchanged; the stop token after it is context."""
    trajectory, policy, replies = play(tokenizer, seed, max_new_tokens=budget, on_cut="continue")
    assert_exact(trajectory, policy.requests, replies)
    stops = renderer_for(tokenizer).stop_token_ids
    for call in trajectory.completions[:-1]:
        if call.finish_reason == "length":
            closing = trajectory.tokens[call.stop]
            assert closing in stops
            assert not trajectory.mask[call.stop]


@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_the_whole_text_reads_as_the_template_writes_it(tokenizer: Any, seed: int) -> None:
    """Between two replies are exactly the template's tokens: no separator is lost or doubled."""
    trajectory, _, _ = play(tokenizer, seed)
    text = renderer_for(tokenizer).decode(trajectory.tokens)
    for call in trajectory.completions[:-1]:
        after = renderer_for(tokenizer).decode(trajectory.tokens[call.stop :])
        assert after.startswith("\n<|im_start|>user\n")
    assert text.count("<|im_start|>assistant\n") == len(trajectory.completions)
    assert "<|im_end|><|im_end|>" not in text


@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_a_sample_carries_the_trajectory_unchanged(tokenizer: Any, seed: int) -> None:
    """The sample has all columns of the trajectory, and ``check_sample`` finds no broken law."""
    trajectory, _, _ = play(tokenizer, seed)
    sample = trajectory_to_sample(trajectory, Prompt("q", index=1, group_index=0), renderer_for(tokenizer).decode)
    assert sample.tokens == trajectory.tokens.tolist()
    assert sample.loss_mask == trajectory.mask.astype(int).tolist()
    assert sum(sample.loss_mask) == sum(call.stop - call.start for call in trajectory.completions)
    assert not list(check_sample(sample))


def test_odd_spelling_is_odd() -> None:
    """The speller of these tests returns other ids than the tokenizer, for the same text."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    speller = Speller(tokenizer, 0, seed=1, odd=1.0)
    text = "What is the answer? The answer is 12."
    ids = speller.spell(text)
    assert tokenizer.decode(ids) == text
    assert ids != tokenizer.encode(text, add_special_tokens=False)


def test_a_reply_to_other_tokens_is_refused() -> None:
    """A completion that was sampled from other than the stored ids is never added to a trajectory."""
    trajectory = Trajectory()
    trajectory.add_context(np.array([1, 2, 3], np.int32))
    for sent in ([1, 2, 4], [1, 2], [1, 2, 3, 4]):
        other = Completion(
            tokens=[5],
            logprobs=[-1.0],
            finish_reason="stop",
            versions=[VersionSpan("v", 0, 1)],
            prompt_tokens=len(sent),
            prompt_digest=digest(np.array(sent, np.int32)),
            request_id="r",
        )
        with pytest.raises(TokenMismatchError, match="sampled from"):
            trajectory.add_reply(other, Message("assistant", "x"))
    assert trajectory.tokens.tolist() == [1, 2, 3]


# -- 4 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
async def test_what_arrives_at_the_server_is_what_is_stored(tokenizer: Any, seed: int) -> None:
    """Over real HTTP, with the versions and logprobs of the server."""
    renderer = renderer_for(tokenizer)
    speller = Speller(tokenizer, renderer.stop_token_ids[0], seed)
    replies: list[list[int]] = []

    def reply(input_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        replies.append(speller.reply())
        return replies[-1]

    async with StubServer(reply=reply) as server:
        endpoint = Endpoint(base_url=server.url, sampling=SamplingParams(max_new_tokens=4096))
        async with SGLangPolicy(endpoint) as policy:
            trajectory = await run_agent(
                Prompt("Well?"),
                partial(RandomWorld, seed),
                policy,
                renderer,
                sampling=endpoint.sampling,
                limits=Limits(max_turns=6),
            )
        assert trajectory.stop_reason is not StopReason.FAILED, trajectory.failure
        assert_exact(trajectory, [request.input_ids for request in server.requests], replies)
