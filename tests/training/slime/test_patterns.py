"""The patterns of the slime recipes run as they stand, on the embedded engine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.dtypes import StopReason
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.integrations.slime import close_rollouts, generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import records
from rollouts.training import Sample
from training.slime.patterns import Reduction, generate, reduced_reward, reward_func


@pytest.fixture(scope="module")
def args() -> Iterator[Namespace]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(running_server(DEMO_MODEL)) as url,
    ):
        host, port = url.removeprefix("http://").split(":")
        yield Namespace(
            rollout_batch_size=2,
            n_samples_per_prompt=3,
            rollout_temperature=1.0,
            rollout_max_response_len=48,
            hf_checkpoint=str(DEMO_MODEL),
            sglang_router_ip=host,
            sglang_router_port=int(port),
        )


def problem(number: int, member: int = 0) -> Any:
    a, b = 12 + number, 30 + number
    return records().sample(
        group_index=number, index=3 * number + member, prompt=f"What is {a} + {b}?", label=str(a + b)
    )


async def test_generate_and_reward_func_serve_slimes_loop(args: Namespace) -> None:
    """Tokens, mask and logprobs of an agent; the reward is computed apart, from the conversation."""
    sample = await generate(args, problem(1), {"temperature": 1.0, "max_new_tokens": 48})
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length < len(sample.tokens)
    assert sum(sample.loss_mask) > 0
    assert (sample.group_index, sample.index, sample.reward) == (1, 3, None)
    assert await reward_func(args, sample) in (0.0, 1.0)


def test_step_rewards_go_through_slimes_door(args: Namespace) -> None:
    """The rewards of the steps travel in the metadata; what is trained on is their reduction, within its bounds."""

    class Problems:
        taken = 0

        def get_samples(self, num_samples: int) -> list[list[Any]]:
            first, self.taken = self.taken, self.taken + num_samples
            return [[problem(number, member) for member in range(3)] for number in range(first, self.taken)]

    launch = Namespace(
        **vars(args),
        rollouts_recipe="training.slime.patterns.recipe",
        rollouts_recipe_options={
            "reward_reduction": "min",
            "nonterminal_reward": -1,
            "max_reward": 0.5,
            "max_turns": 4,
        },
    )
    try:
        output = generate_rollout_batch(launch, 0, Problems())
    finally:
        close_rollouts()
    for sample in leaves(output.samples):
        assert isinstance(sample.metadata["step_rewards"], list)
        assert -1.0 <= sample.reward <= 0.5


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 1.25), ("mean", 1.25 / 3), ("max", 1.0), ("min", -0.25)])
def test_steps_are_reduced(reduction: Reduction, expected: float) -> None:
    """Sum, mean, max, min."""
    sample = Sample(metadata={"step_rewards": [0.5, -0.25, 1.0]}, stop_reason=StopReason.TASK_COMPLETED)
    assert reduced_reward(sample, reduction=reduction) == pytest.approx(expected)


def test_penalty_and_bounds() -> None:
    """An episode cut by a limit gets the penalty before the reduction; the bounds apply last."""
    sample = Sample(metadata={"step_rewards": [0.5]}, stop_reason=StopReason.MAX_TURNS)
    assert reduced_reward(sample, nonterminal_reward=-2.0) == -1.5
    assert reduced_reward(sample, nonterminal_reward=-2.0, min_reward=-1.0) == -1.0
    assert reduced_reward(sample, max_reward=0.25) == 0.25
    assert reduced_reward(Sample(metadata={"step_rewards": []}), reduction="mean") == 0.0
