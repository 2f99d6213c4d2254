"""Countdown: combine given numbers to a target.

rollouts run countdown --out runs/countdown
"""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.environments.countdown import Countdown, countdown_prompts, countdown_reward, load_countdown


@recipe_defaults(max_new_tokens=1024)
def recipe(
    endpoint: Endpoint,
    *,
    data: Path | None = None,
    input_key: str | None = None,
    label_key: str | None = None,
    prompts: int = 2000,
    numbers: int = 3,
    format_reward: float = 0.0,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Rows from ``data``, or generated problems."""
    made_up = islice(countdown_prompts(seed, numbers=numbers), prompts)
    return agent_recipe(
        "countdown",
        endpoint,
        Countdown,
        made_up if data is None else load_countdown(data, limit=prompts, prompt=input_key, label=label_key),
        reward_fn=partial(countdown_reward, format_reward=format_reward),
        max_turns=1,
        seed=seed,
        **options,
    )
