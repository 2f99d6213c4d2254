"""Function calling on rows in the form of the Berkeley leaderboard.

    rollouts run function_calling --endpoint http://HOST:30000 --model Qwen/Qwen2.5-7B-Instruct \\
        --data bfcl_simple_python.jsonl --out runs/calls
    rollouts run function_calling --endpoint http://HOST:30000 --model Qwen/Qwen2.5-7B-Instruct \\
        --data bfcl_multi_turn_base.jsonl --set variant=turns --out runs/turns
"""

from pathlib import Path
from typing import Literal, Unpack

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.environments.function_calling import (
    CallsInTurns,
    FunctionCalling,
    call_reward,
    load_calls,
    load_turns,
    turns_reward,
)


@recipe_defaults(max_new_tokens=512)
def recipe(
    endpoint: Endpoint,
    *,
    data: Path,
    input_key: str | None = None,
    label_key: str | None = None,
    variant: Literal["one_reply", "turns"] = "one_reply",
    limit: int | None = None,
    max_turns: int = 24,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Each prompt has its own functions; the first reply is scored, or a conversation on a simulated disk."""
    in_turns = variant == "turns"
    return agent_recipe(
        "function_calling" + "-turns" * in_turns,
        endpoint,
        CallsInTurns if in_turns else FunctionCalling,
        load_turns(data, limit=limit) if in_turns else load_calls(data, limit=limit, prompt=input_key, label=label_key),
        reward_fn=turns_reward if in_turns else call_reward,
        max_turns=max_turns,
        seed=seed,
        **options,
    )
