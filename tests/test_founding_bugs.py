"""Regression tests for the bugs of the rollout manager that this project replaces.

One simple test a bug; its docstring describes the bug. Other test files check the same laws exhaustively.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from rollouts.agent import run_agent
from rollouts.dtypes import Message, Prompt, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, SingleTurnEnvironment
from rollouts.errors import ConfigError, FilterFailure
from rollouts.renderer import load_tokenizer, renderer_for
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    RolloutConfig,
    Sample,
    Status,
    check_reward_nonzero_std,
    trajectory_to_sample,
)

PROMPTS = [f"question {number}" for number in range(64)]


def generator(seed: int = 0, *, failing: float = 0.0) -> Callable[[Sequence[Prompt]], Any]:
    """Rollouts that take a random number of turns of the loop; some raise."""
    rng = random.Random(seed)

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        for _ in range(rng.randint(0, 30)):
            await checkpoint()
        if rng.random() < failing:
            raise RuntimeError("this one fails")
        return [Sample(prompt=prompt.prompt, tokens=[1, 2], loss_mask=[0, 1]) for prompt in prompts]

    return generate


def config(**options: Any) -> RolloutConfig:
    rng = random.Random(1)
    given = {"generate_fn": generator(), "reward_fn": lambda sample: rng.random(), **options}
    return RolloutConfig(**{"batch_size": 8, "n_samples_per_prompt": 4, **given})


async def test_a_filter_sees_the_rollouts_of_one_prompt() -> None:
    """Groups were slices of the results in order of arrival: 12 of 12 contained more than one prompt."""
    seen: list[set[Any]] = []

    def record(samples: list[Sample]) -> bool:
        seen.append({sample.prompt for sample in samples})
        return True

    await AsyncRolloutManager(config(filter_fn=record), DataBuffer(PROMPTS)).generate_batch()
    assert len(seen) >= 8
    assert all(len(prompts) == 1 for prompts in seen)


async def test_a_batch_takes_whole_groups() -> None:
    """Batches were filled with single samples: 10 of 11 prompts of a batch had fewer than four."""
    batch = await AsyncRolloutManager(config(), DataBuffer(PROMPTS)).generate_batch()
    prompts = [sample.prompt for sample in batch]
    assert len(batch) == 32
    assert all(prompts.count(prompt) == 4 for prompt in prompts)


async def test_a_group_index_belongs_to_one_prompt() -> None:
    """The index restarted at 0 with each refill: in the second batch 6 of 11 ids had several prompts."""
    manager = AsyncRolloutManager(config(), DataBuffer(PROMPTS, seed=3))
    async with manager:
        samples = [sample for _ in range(4) for sample in await manager.generate_batch()]
    owners = {(sample.group_index, sample.prompt) for sample in samples}
    assert len(owners) == len({group for group, _ in owners}) == 32


async def test_the_filter_runs_after_the_reward() -> None:
    """The filter received [0.0, 0.0] for rewards 0.2 and 0.84: a filter on spread would have dropped all groups."""
    seen: list[float | None] = []

    def record(samples: list[Sample]) -> bool:
        seen.extend(sample.reward for sample in samples)
        return check_reward_nonzero_std(samples)

    await AsyncRolloutManager(config(filter_fn=record), DataBuffer(PROMPTS)).generate_batch()
    assert None not in seen
    assert len(set(seen)) > 4


async def test_a_filter_that_rejects_everything_ends_the_run() -> None:
    """The run looped for ever."""
    manager = AsyncRolloutManager(config(filter_fn=lambda samples: False, patience=20), DataBuffer(PROMPTS))
    with pytest.raises(FilterFailure, match=r"accepted none of the last 2\d groups"):
        await manager.generate_batch()


def test_spread_of_one_sample_is_refused_at_once() -> None:
    """The standard deviation of one value is NaN: every group was dropped, for ever."""
    with pytest.raises(ConfigError, match="n_samples_per_prompt: got 1; expected at least 2"):
        config(n_samples_per_prompt=1, filter_fn=check_reward_nonzero_std)


async def test_a_failing_rollout_fails_alone() -> None:
    """One exception cancelled all rollouts."""
    manager = AsyncRolloutManager(config(generate_fn=generator(failing=0.3), max_attempts=4), DataBuffer(PROMPTS))
    batch = await manager.generate_batch()
    assert len(batch) == 32
    assert max(sample.metrics["attempts"] for sample in batch) > 1


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
@pytest.mark.parametrize("system", ["You are careful.", ""])
async def test_the_mask_marks_the_sampled_tokens(
    small_tokenizer_folder: Callable[[str], Path], name: str, system: str
) -> None:
    """Each message was rendered alone: headers and tool results were trained, final words and stop tokens were not."""
    tokenizer = load_tokenizer(small_tokenizer_folder(name))
    renderer = renderer_for(tokenizer)
    texts = ['<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call><|im_end|>',
            "The answer is 8<|im_end|>"]  # fmt: skip
    policy = ScriptedPolicy([tokenizer.encode(text, add_special_tokens=False) for text in texts])

    class Calculator(CalculatorEnvironment):
        system_prompt = system

    prompt = Prompt("What is 5 + 3?", index=0)
    trajectory = await run_agent(prompt, Calculator, policy, renderer, sampling=SamplingParams())
    sample = trajectory_to_sample(trajectory, prompt, renderer.decode)
    trained = [token for token, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight]
    assert tokenizer.decode(trained) == "".join(texts)
    assert "<tool_response>\n8\n</tool_response>" in sample.response


async def test_a_sample_has_status_length_and_logprobs() -> None:
    """Logprobs were missing, response_length was 0, and every status was COMPLETED."""
    renderer = renderer_for(load_tokenizer(DEMO_MODEL))
    words = list(renderer.opening([Message("user", "one two three four")]))
    prompt = Prompt("?", index=0)
    trajectory = await run_agent(
        prompt, SingleTurnEnvironment, ScriptedPolicy([words]), renderer, sampling=SamplingParams(max_new_tokens=5)
    )
    sample = trajectory_to_sample(trajectory, prompt, renderer.decode)
    assert sample.status is Status.TRUNCATED
    assert sample.response_length == 5
    assert all(logprob < 0 for logprob in sample.rollout_log_probs[-5:])


def test_filters_need_no_torch() -> None:
    """The filters imported torch."""
    code = "import sys, rollouts.training.filters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
