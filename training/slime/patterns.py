"""Common patterns of slime users, written for this package. Copy what you need.

1. ``generate`` and ``reward_func`` for slime's own loop, with a client that all rollouts share:

       --custom-generate-function-path training.slime.patterns.generate
       --custom-rm-path training.slime.patterns.reward_func

2. Step rewards, reduced to one number (sum, mean, max, min), with a penalty for unfinished episodes and with
   bounds: :func:`recipe` with ``--rollout-function-path rollouts.integrations.slime.generate_rollout_batch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from rollouts.dtypes import Endpoint, Message, Prompt, StopReason
from rollouts.environments.base import StepResult
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.integrations.slime import policy_for, to_slime
from rollouts.recipe import Recipe
from rollouts.training import DataBuffer, RolloutConfig, Sample, agent_rollout_to_sample
from rollouts.training.step_rewards import Reduction, reduced
from rollouts.trajectory import Trajectory

# -- 1. slime's own loop ----------------------------------------------------------------------------------------------


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """An agent as slime's custom generate function: exact tokens, mask and logprobs of the engine."""
    policy = policy_for(args)
    sampling = attrs.evolve(
        policy.endpoint.sampling,
        temperature=sampling_params["temperature"],
        max_new_tokens=sampling_params["max_new_tokens"],
    )
    played = await agent_rollout_to_sample(
        Prompt(sample.prompt, label=sample.label, index=sample.index),
        environment_cls=CalculatorEnvironment,
        endpoint=policy.endpoint,
        tokenizer=args.hf_checkpoint,
        sampling=sampling,
        policy=policy,
        max_turns=6,
    )
    return to_slime(played, template=sample, scored=False)


async def reward_func(args: Any, sample: Any, **kwargs: Any) -> float:
    """Score the last message against the label, separately from the rollout."""
    last = sample.messages[-1]
    return float(last["role"] == "assistant" and last["content"] == f"The answer is {sample.label}.")


# -- 2. rewards of steps ----------------------------------------------------------------------------------------------


class StepRewarded(CalculatorEnvironment):
    """The calculator with step rewards: a cost for each call, and a reward for the answer."""

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.label = prompt.label
        return await super().start(prompt)

    async def step(self, reply: Message) -> StepResult:
        result = await super().step(reply)
        if result.done:
            return attrs.evolve(result, reward=float(f"The answer is {self.label}." in reply.content))
        return attrs.evolve(result, reward=-0.1 * result.metrics.get("tool_errors", 0))


async def generate_with_step_rewards(prompts: Sequence[Prompt], **options: Any) -> list[Sample]:
    """As ``generate_rollout_batch`` for one prompt, with the reward of each step in the metadata."""
    (prompt,) = prompts
    seen: list[Trajectory] = []
    sample = await agent_rollout_to_sample(prompt, on_step=seen.append, **options)
    sample.metadata["step_rewards"] = list(seen[-1].step_rewards) if seen else []
    return [sample]


def reduced_reward(
    sample: Sample,
    *,
    reduction: Reduction = "sum",
    nonterminal_reward: float | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
) -> float:
    """Reduce the step rewards to one number: first the penalty, then the reduction, then the bounds."""
    return reduced(
        sample.metadata["step_rewards"],
        reduction=reduction,
        further=None if sample.stop_reason is StopReason.TASK_COMPLETED else nonterminal_reward,
        lowest=min_reward,
        highest=max_reward,
    )


def recipe(
    endpoint: Endpoint,
    *,
    reward_reduction: Reduction = "sum",
    nonterminal_reward: float | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    max_turns: int = 20,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
) -> Recipe:
    """Step rewards with a configurable reduction; the prompts are the trainer's."""
    return Recipe(
        name="step-rewards",
        config=RolloutConfig(
            batch_size=batch_size,
            n_samples_per_prompt=n_samples_per_prompt,
            generate_fn=partial(
                generate_with_step_rewards,
                environment_cls=StepRewarded,
                endpoint=endpoint,
                tokenizer=endpoint.model,
                max_turns=max_turns,
            ),
            reward_fn=partial(
                reduced_reward,
                reduction=reward_reduction,
                nonterminal_reward=nonterminal_reward,
                min_reward=min_reward,
                max_reward=max_reward,
            ),
        ),
        data_buffer=DataBuffer(["What is 2 + 2?"]),
        endpoint=endpoint,
        tokenizer=endpoint.model,
        environment_cls=StepRewarded,
    )
