"""Calculator agents for training: smaller batches than calculator, every group kept, and problems by kind.

scripts/learn
"""

from itertools import islice
from typing import Any, Literal, Unpack

from rollouts.dtypes import Endpoint
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.configs.calculator import exact_answer_reward

HELD_OUT_PAIRS = ("+*", "*-", "-+")
"""Operators of two steps that no training problem has."""

KINDS: dict[str, dict[str, Any]] = {
    "trained": {
        "two_step_share": 0.34,
        "numbers": (1, 59),
        "pairs": [a + b for a in "+-*" for b in "+-*" if a + b not in HELD_OUT_PAIRS],
    },
    "one_step_60_99": {"two_step_share": 0.0, "numbers": (60, 99)},
    "unseen_pairs_60_99": {"two_step_share": 1.0, "numbers": (60, 99), "pairs": HELD_OUT_PAIRS},
}
"""Problems to train on, and two kinds that are only evaluated on: none of their numbers or pairs is trained on."""


@recipe_defaults(batch_size=16, over_sampling_factor=1.0, max_new_tokens=64, keep="all")
def recipe(
    endpoint: Endpoint,
    *,
    kind: Literal["trained", "one_step_60_99", "unseen_pairs_60_99"] = "trained",
    max_turns: int = 4,
    prompts: int = 2000,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Groups without spread stay in the batch, so that its mean reward is the policy's. The trainer skips them."""
    return agent_recipe(
        "calculator_grpo",
        endpoint,
        CalculatorEnvironment,
        islice(calculator_prompts(seed, **KINDS[kind]), prompts),
        reward_fn=exact_answer_reward,
        max_turns=max_turns,
        seed=seed,
        **options,
    )
