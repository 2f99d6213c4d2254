"""GSM8K against a server of yours, in one reply or with a calculator.

    rollouts run configs/gsm8k.py --endpoint http://HOST:30000 --model Qwen/Qwen2.5-7B-Instruct \\
        --data gsm8k_train.jsonl --out runs/gsm8k
"""

from functools import partial
from pathlib import Path
from typing import Literal

import attrs

from environments.gsm8k import CalculatorGSM8K, SingleTurnGSM8K, gsm8k_reward, load_gsm8k
from rollouts.dtypes import Endpoint, History, SamplingParams
from rollouts.recipe import Recipe
from rollouts.training import (
    DataBuffer,
    RolloutConfig,
    check_reward_nonzero_std,
    generate_rollout_batch,
)

ENVIRONMENTS = {"single_turn": SingleTurnGSM8K, "calculator": CalculatorGSM8K}


def recipe(
    endpoint: Endpoint,
    *,
    data: Path,
    variant: Literal["single_turn", "calculator"] = "single_turn",
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    over_sampling_factor: float = 1.5,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    max_turns: int = 8,
    keep: Literal["spread", "all"] = "spread",
    limit: int | None = None,
    batches: int = 1,
    history: History = "append",
    seed: int = 0,
) -> Recipe:
    """GSM8K rows from ``data``; ``keep=all`` also takes groups whose rewards do not differ."""
    sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    endpoint = attrs.evolve(endpoint, sampling=sampling)
    environment_cls = ENVIRONMENTS[variant]
    generate_fn = partial(
        generate_rollout_batch,
        environment_cls=environment_cls,
        endpoint=endpoint,
        tokenizer=endpoint.model,
        max_turns=max_turns,
        history=history,
    )
    return Recipe(
        name=f"gsm8k-{variant}",
        config=RolloutConfig(
            batch_size=batch_size,
            n_samples_per_prompt=n_samples_per_prompt,
            over_sampling_factor=over_sampling_factor,
            generate_fn=generate_fn,
            reward_fn=gsm8k_reward,
            filter_fn=check_reward_nonzero_std if keep == "spread" else None,
        ),
        data_buffer=DataBuffer(load_gsm8k(data, limit=limit), seed=seed),
        endpoint=endpoint,
        tokenizer=endpoint.model,
        environment_cls=environment_cls,
        batches=batches,
        seed=seed,
    )
