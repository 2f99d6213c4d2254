"""One rollout in slime's own loop: slime always gets a usable sample."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from rollouts.dtypes import SamplingParams, StopReason
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.inference.base import CompletionRequest
from rollouts.integrations.slime import generate, policy_for, reward
from rollouts.integrations.slime.records import records
from rollouts.testing.server import StubServer
from rollouts.training import Prompt, Sample, Status
from tests.integrations.slime import test_evaluation
from tests.integrations.slime.launches import Launch, made_sample

SAMPLING = {"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 9}


def asked(**fields: Any) -> Any:
    return records().sample(**{"index": 3, "group_index": 1, "prompt": "p", "label": "l", **fields})


async def test_the_sample_is_filled_in_place() -> None:
    """Tokens, mask, logprobs and the recipe's reward; what slime had put on it stays. Its flag names the function."""
    launch = Launch(play=_alone, reward=lambda sample: 0.5)
    sample, flag = asked(session_id="s", metadata={"a": 1}), "rollouts.integrations.slime.generate"
    sets = [Namespace(name="one", path="", custom_generate_function_path=flag)]
    args = launch.args(custom_generate_function_path=flag, eval_datasets=sets)
    made = await generate(args, sample, dict(SAMPLING))
    assert made is sample
    assert (made.response_length, made.reward, made.session_id, made.metadata) == (10, 0.5, "s", {"a": 1})
    assert made.status is records().sample.Status.COMPLETED
    assert made.to_dict()["status"] == "completed"


async def _alone(prompt: Prompt) -> list[Sample]:
    return [made_sample(prompt)]


class _Played:
    """Plays without a group index, as slime's own loop gives none of ours."""

    def __init__(self, status: Status = Status.COMPLETED, forks: int = 1, error: bool = False) -> None:
        self.status, self.forks, self.error, self.times = status, forks, error, 0

    async def __call__(self, prompt: Prompt) -> list[Sample]:
        self.times += 1
        if self.error:
            raise RuntimeError("the world ended")
        return [made_sample(prompt, status=self.status, branch=branch) for branch in range(self.forks)]


async def test_forks_share_a_rollout_id() -> None:
    """A list of samples, as slime's fan-out wants it."""
    launch = Launch(play=_Played(forks=3), reward=lambda sample: 1.0)
    made = await generate(launch.args(), asked(), dict(SAMPLING))
    assert [sample.rollout_id for sample in made] == [3, 3, 3]


async def test_the_reward_scores_the_end_of_a_forked_rollout() -> None:
    """Once, as in a run of our own: its other branches get that reward."""
    scored: list[Any] = []

    async def play(prompt: Prompt) -> list[Sample]:
        branches = [made_sample(prompt, branch=branch) for branch in range(3)]
        for branch in branches[:-1]:
            branch.stop_reason = StopReason.FORKED
        return branches

    def reward(sample: Sample) -> float:
        scored.append(sample.stop_reason)
        return 0.5

    made = await generate(Launch(play=play, reward=reward).args(), asked(), dict(SAMPLING))
    assert [sample.reward for sample in made] == [0.5, 0.5, 0.5]
    assert len(scored) == 1


async def test_a_failure_is_taken_out_of_the_loss() -> None:
    """After a second attempt: an exception would end every rollout of slime in flight."""
    play = _Played(error=True)
    made = await generate(Launch(play=play).args(), asked(), dict(SAMPLING))
    assert play.times == 2
    assert (made.remove_sample, made.reward, made.loss_mask, made.rollout_log_probs) == (True, 0.0, [0], [0.0])
    assert (len(made.tokens), made.response_length) == (2, 1)
    assert "the world ended" in made.metadata["failure"]
    assert made.to_dict()["status"] == "failed"


async def test_an_abort_of_slimes_stays_one() -> None:
    """slime stopped the engines, and calls again later."""
    made = await generate(Launch(play=_Played(Status.ABORTED)).args(), asked(), dict(SAMPLING))
    assert made.status is records().sample.Status.ABORTED
    assert made.tokens == []


async def test_the_recipes_reward_scores_one_or_many() -> None:
    """``--custom-rm-path`` is called with a sample, or with a list."""
    launch = Launch(reward=lambda sample: float(len(sample.response)))
    args = launch.args()
    samples = [asked(response="ab", tokens=[1, 2], response_length=1, loss_mask=[1]) for _ in range(2)]
    assert await reward(args, samples[0]) == 2.0
    assert await reward(args, samples) == [2.0, 2.0]


async def test_without_a_recipe_it_says_so() -> None:
    """By the name of the argument."""
    with pytest.raises(ConfigError, match="rollouts_recipe"):
        await generate(Launch().args(rollouts_recipe=None), asked(), dict(SAMPLING))


async def test_a_recipe_is_tested_before_its_first_rollout() -> None:
    """Also in slime's own loop: an unknown dialect would make every rollout worthless, so the launch ends."""
    async with StubServer() as server:
        host, port = server.url.removeprefix("http://").split(":")
        flags = {"rollouts_recipe": "calculator", "rollouts_recipe_options": {"dialect": "klingon"}}
        place = {"sglang_router_ip": host, "sglang_router_port": int(port), "hf_checkpoint": str(DEMO_MODEL)}
        with pytest.raises(ConfigError, match="klingon"):
            await generate(Launch().args(**flags, **place), asked(), dict(SAMPLING))
        assert server.requests == []


async def test_a_recipe_with_a_sampler_is_refused() -> None:
    """slime's data source chooses the prompts."""
    flags = {"rollouts_recipe": "calculator", "rollouts_recipe_options": {"sampler": "pass_rate"}}
    with pytest.raises(ConfigError, match=r"sampler: got 'PassRateSampler'; expected .uniform.: slime's data source"):
        await generate(Launch().args(**flags, hf_checkpoint=str(DEMO_MODEL)), asked(), dict(SAMPLING))


@pytest.mark.parametrize("evaluation", [False, True])
async def test_an_evaluation_has_its_own_bound_of_the_context(evaluation: bool) -> None:
    """``--eval-max-context-len`` in slime's evaluation, ``--rollout-max-context-len`` in its training."""
    async with StubServer() as server:
        host, port = server.url.removeprefix("http://").split(":")
        flags = {"rollouts_recipe": f"{test_evaluation.__name__}.of_one_reply", "rollouts_recipe_options": {}}
        flags |= {"rollout_max_context_len": 30, "eval_max_context_len": 40}
        place = {"sglang_router_ip": host, "sglang_router_port": int(port), "hf_checkpoint": str(DEMO_MODEL)}
        await generate(Launch().args(**flags, **place), asked(), {**SAMPLING, "max_new_tokens": 64}, evaluation)
        (request,) = server.requests
    assert len(request.input_ids) + request.sampling_params["max_new_tokens"] == (40 if evaluation else 30)


async def test_a_sample_with_ids_is_refused() -> None:
    """The recipe renders its prompt: the ids that the sample brings would not be sent."""
    with pytest.raises(ConfigError, match=r"slime sample 3\.tokens: got '2 ids'; expected nothing with a recipe"):
        await generate(Launch(play=_alone).args(), asked(tokens=[5, 6]), dict(SAMPLING))


async def test_images_are_shown_or_refused() -> None:
    """Those that slime's data set loaded are in the messages; a text does not say where they are."""
    picture = pytest.importorskip("PIL.Image").new("RGB", (2, 3))
    shown: list[Any] = []

    async def play(prompt: Prompt) -> list[Sample]:
        shown.extend((image.width, image.height) for message in prompt.messages for image in message.images)
        return [made_sample(prompt)]

    args, media = Launch(play=play, reward=lambda sample: 1.0).args(), {"multimodal_inputs": {"images": [picture]}}
    messages = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    await generate(args, asked(prompt=messages, **media), dict(SAMPLING))
    assert shown == [(2, 3)]
    with pytest.raises(ConfigError, match=r"slime sample 3\.prompt: .*expected messages with its images"):
        await generate(args, asked(prompt="<image> What?", **media), dict(SAMPLING))


async def test_the_client_is_shared() -> None:
    """One pool of connections for all rollouts of a loop."""
    args = Launch().args()
    assert policy_for(args) is policy_for(args)


async def test_ids_outside_the_vocabulary_are_never_sent() -> None:
    """The slime door reads the vocabulary from ``hf_checkpoint``: one such id would kill every engine in turn."""
    async with StubServer() as server:
        host, port = server.url.removeprefix("http://").split(":")
        args = Launch().args(sglang_router_ip=host, sglang_router_port=int(port), hf_checkpoint=str(DEMO_MODEL))
        for bad in (1_000_000, -1):
            with pytest.raises(ConfigError, match=rf"tokens\[1\]: got id {bad}; expected 0 <= id < "):
                await policy_for(args).complete(
                    CompletionRequest(np.array([1, bad], np.int32), SamplingParams(max_new_tokens=1))
                )
        assert not server.requests
