"""GSM8K on your own server, in one reply or with a calculator.

    rollouts run gsm8k --endpoint http://HOST:30000 --model Qwen/Qwen2.5-7B-Instruct \\
        --data gsm8k_train.jsonl --out runs/gsm8k
"""

from pathlib import Path
from typing import Literal

from rollouts.dtypes import Endpoint, OnRewrite
from rollouts.environments.base import EnvironmentFactory
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.environments.gsm8k import CalculatorGSM8K, SingleTurnGSM8K, gsm8k_reward, load_gsm8k

ENVIRONMENTS: dict[str, EnvironmentFactory] = {"single_turn": SingleTurnGSM8K, "calculator": CalculatorGSM8K}


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
    history: OnRewrite = "append",
    seed: int = 0,
) -> Recipe:
    """GSM8K rows from ``data``; ``keep=all`` also keeps groups without spread."""
    return agent_recipe(
        f"gsm8k-{variant}",
        endpoint,
        ENVIRONMENTS[variant],
        load_gsm8k(data, limit=limit),
        reward_fn=gsm8k_reward,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        over_sampling_factor=over_sampling_factor,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        keep=keep,
        history=history,
        batches=batches,
        seed=seed,
    )
