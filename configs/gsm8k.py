"""GSM8K on your own server, in one reply or with a calculator.

    rollouts run gsm8k --endpoint http://HOST:30000 --model Qwen/Qwen2.5-7B-Instruct \\
        --data gsm8k_train.jsonl --out runs/gsm8k
"""

from pathlib import Path
from typing import Literal, Unpack

from rollouts.dtypes import Endpoint
from rollouts.environments.base import EnvironmentFactory
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.environments.gsm8k import CalculatorGSM8K, SingleTurnGSM8K, gsm8k_reward, load_gsm8k

ENVIRONMENTS: dict[str, EnvironmentFactory] = {"single_turn": SingleTurnGSM8K, "calculator": CalculatorGSM8K}


@recipe_defaults(temperature=1.0, max_new_tokens=1024)
def recipe(
    endpoint: Endpoint,
    *,
    data: Path,
    input_key: str | None = None,
    label_key: str | None = None,
    variant: Literal["single_turn", "calculator"] = "single_turn",
    max_turns: int = 8,
    limit: int | None = None,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """GSM8K rows from ``data``; ``keep=all`` also keeps groups without spread."""
    return agent_recipe(
        f"gsm8k-{variant}",
        endpoint,
        ENVIRONMENTS[variant],
        load_gsm8k(data, limit=limit, prompt=input_key, label=label_key),
        reward_fn=gsm8k_reward,
        max_turns=max_turns,
        seed=seed,
        **options,
    )
