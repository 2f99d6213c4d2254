"""One scored rollout for a trainer that schedules rollouts itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Limits, Message, Prompt, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, SingleTurnEnvironment
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError, GenerateFailure
from rollouts.integrations.episodes import Episodes, prompt_of
from rollouts.renderer import Renderer, load_tokenizer
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.training import Sample


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(DEMO_MODEL))


class Once(SingleTurnEnvironment):
    """Ends after the first reply, with a reward of 0.5 for the step."""

    async def step(self, reply: Message) -> StepResult:
        return StepResult(done=True, reward=0.5)


def policies(renderer: Renderer, *replies: Sequence[str]) -> Callable[[], ScriptedPolicy]:
    """A policy for each attempt, with its replies."""
    left = iter(replies)
    return lambda: ScriptedPolicy([renderer.encode(text).tolist() for text in next(left)])


async def play(episodes: Episodes, renderer: Renderer, new_policy: Callable[[], Any], **options: Any) -> list[Sample]:
    return await episodes.play(prompt_of("2 + 3?", label="5"), new_policy, renderer, SamplingParams(), **options)


async def test_a_rollout_is_scored_by_the_reward_function(renderer: Renderer) -> None:
    """It gets the sample with the prompt's label; without one the sum of the step rewards counts."""

    def reward(sample: Sample) -> float:
        return float(sample.label == "5")

    (row,) = await play(Episodes(environment_cls=Once, reward_fn=reward), renderer, policies(renderer, ["5<|im_end|>"]))
    assert (row.reward, row.step_rewards, row.loss_mask[-1]) == (1.0, [0.5], 1)
    (row,) = await play(Episodes(environment_cls=Once), renderer, policies(renderer, ["5<|im_end|>"]))
    assert row.reward == 0.5


async def test_a_row_ends_in_the_last_reply(renderer: Renderer) -> None:
    """The result of a call that no reply could answer is cut off."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    limits = Limits(max_turns=1, last_calls="run")
    episodes = Episodes(environment_cls=CalculatorEnvironment, limits=limits)
    (row,) = await play(episodes, renderer, policies(renderer, [call]), scored=False)
    assert (row.loss_mask[-1], row.reward) == (1, None)


async def test_a_row_is_within_the_limit_of_tokens(renderer: Renderer) -> None:
    """A bridge may pass ``max_tokens``, and then no reply answers it."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    episodes = Episodes(environment_cls=CalculatorEnvironment, limits=Limits(max_turns=2))
    (row,) = await play(episodes, renderer, policies(renderer, [call, "5<|im_end|>"]), scored=False)
    limit = row.completions[0].stop + 2
    episodes = Episodes(environment_cls=CalculatorEnvironment, limits=Limits(max_turns=2, max_tokens=limit))
    (row,) = await play(episodes, renderer, policies(renderer, [call]), scored=False)
    assert len(row) == row.completions[0].stop < limit


async def test_a_failed_attempt_is_repeated(renderer: Renderer) -> None:
    """With a new policy; after the last one the error names the cause."""

    class Failing(Once):
        left = 1

        async def step(self, reply: Message) -> StepResult:
            if Failing.left:
                Failing.left -= 1
                raise OSError("no room")
            return await super().step(reply)

    (row,) = await play(Episodes(environment_cls=Failing), renderer, policies(renderer, ["1"], ["5<|im_end|>"]))
    assert row.reward == 0.5
    Failing.left = 2
    with pytest.raises(GenerateFailure, match=r"failed in 2 attempts: .*no room"):
        await play(Episodes(environment_cls=Failing), renderer, policies(renderer, ["1"], ["1"]))


async def test_a_reward_that_fails_fails_the_rollout(renderer: Renderer) -> None:
    """It is not zero."""

    def broken(sample: Sample) -> float:
        raise OSError("no room")

    episodes = Episodes(environment_cls=Once, reward_fn=broken, attempts=1)
    with pytest.raises(GenerateFailure, match=r"failed in 1 attempts: .*no room"):
        await play(episodes, renderer, policies(renderer, ["5"]))


async def test_an_aborted_rollout_is_no_row(renderer: Renderer) -> None:
    """A reply that the server cut short is not trained as if it had ended."""
    ids = renderer.encode("5").tolist()
    with pytest.raises(GenerateFailure, match="aborted"):
        await play(
            Episodes(environment_cls=Once, attempts=1), renderer,
            lambda: ScriptedPolicy([Reply(ids, finish_reason="abort")]),
        )  # fmt: skip


async def test_a_prompt_without_room_for_a_reply_is_an_error(renderer: Renderer) -> None:
    """There is no row without a sampled token."""
    episodes = Episodes(environment_cls=Once, limits=Limits(max_tokens=2), attempts=1)
    with pytest.raises(GenerateFailure):
        await play(episodes, renderer, policies(renderer, ["5"]))


def test_a_recipe_brings_its_limits_and_rewards() -> None:
    """Those that the configuration names go first; the data of the recipe are not played."""
    of_recipe = Episodes.of(recipe="calculator", recipe_options={"max_turns": 5})
    assert (of_recipe.limits.max_turns, of_recipe.environment_cls) == (5, CalculatorEnvironment)
    own = Episodes.of(recipe="calculator", limits={"max_turns": 2}, attempts=4, history="error")
    assert (own.limits, own.attempts, own.history) == (Limits(max_turns=2), 4, "error")


def test_a_sampler_is_refused() -> None:
    """The trainer chooses the prompts: the option would have no effect."""
    with pytest.raises(ConfigError, match=r"sampler: got 'PassRateSampler'; expected .uniform.: the trainer chooses"):
        Episodes.of(recipe="calculator", recipe_options={"sampler": "pass_rate"})


def test_a_reward_for_whole_groups_is_refused(tmp_path: Path) -> None:
    """One rollout at a time is scored; another reward function can be named."""
    (tmp_path / "of_groups.py").write_text(
        "from rollouts.environments import SingleTurnEnvironment\n"
        "from rollouts.recipe import agent_recipe\n"
        "def of_group(samples): return [0.0 for _ in samples]\n"
        "def recipe(endpoint):\n"
        "    return agent_recipe('g', endpoint, SingleTurnEnvironment, ['x'], reward_fn=of_group, group_rm=True)\n"
    )
    path = str(tmp_path / "of_groups.py")
    with pytest.raises(ConfigError, match=r"group_rm.*one at a time"):
        Episodes.of(recipe=path)
    assert Episodes.of(recipe=path, reward="tests.integrations.verl_recipe:is_one").reward_fn is not None


def test_a_prompt_of_a_trainer_is_messages_or_a_text() -> None:
    """With label and metadata; the columns of a data set may hold read-only mappings."""
    prompt = prompt_of([{"role": "user", "content": "hi"}], label=5, metadata={"n": 1})
    assert prompt == Prompt([Message("user", "hi")], label=5, metadata={"n": 1})
    assert prompt_of("hi").prompt == "hi"
