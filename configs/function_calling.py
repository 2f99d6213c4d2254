"""Function calling on rows in the form of the Berkeley leaderboard.

    rollouts run configs/function_calling.py --endpoint http://HOST:30000 --model Qwen/Qwen2.5-7B-Instruct \\
        --data bfcl_simple_python.jsonl --out runs/calls
"""

from pathlib import Path
from typing import Literal

from environments.function_calling import FunctionCalling, call_reward, load_calls
from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, agent_recipe


def recipe(
    endpoint: Endpoint,
    *,
    data: Path,
    limit: int | None = None,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    max_new_tokens: int = 512,
    keep: Literal["spread", "all"] = "spread",
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Each prompt brings its own functions; the first reply is scored."""
    return agent_recipe(
        "function_calling",
        endpoint,
        FunctionCalling,
        load_calls(data, limit=limit),
        reward_fn=call_reward,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        max_new_tokens=max_new_tokens,
        max_turns=2,
        keep=keep,
        batches=batches,
        seed=seed,
    )
