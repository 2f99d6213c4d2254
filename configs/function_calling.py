"""Function calling on rows in the form of the Berkeley leaderboard.

    rollouts run function_calling --endpoint http://HOST:30000 --model Qwen/Qwen2.5-7B-Instruct \\
        --data bfcl_simple_python.jsonl --out runs/calls
    rollouts run function_calling --endpoint http://HOST:30000 --model Qwen/Qwen2.5-7B-Instruct \\
        --data bfcl_multi_turn_base.jsonl --set variant=turns --out runs/turns
"""

from pathlib import Path
from typing import Literal

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.environments.function_calling import (
    CallsInTurns,
    FunctionCalling,
    call_reward,
    load_calls,
    load_turns,
    turns_reward,
)


def recipe(
    endpoint: Endpoint,
    *,
    data: Path,
    variant: Literal["one_reply", "turns"] = "one_reply",
    limit: int | None = None,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    max_new_tokens: int = 512,
    max_turns: int = 24,
    keep: Literal["spread", "all"] = "spread",
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Each prompt has its own functions; the first reply is scored, or a conversation on a simulated disk."""
    in_turns = variant == "turns"
    return agent_recipe(
        "function_calling" + "-turns" * in_turns,
        endpoint,
        CallsInTurns if in_turns else FunctionCalling,
        load_turns(data, limit=limit) if in_turns else load_calls(data, limit=limit),
        reward_fn=turns_reward if in_turns else call_reward,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        keep=keep,
        batches=batches,
        seed=seed,
    )
