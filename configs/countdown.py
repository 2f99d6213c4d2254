"""Countdown: combine given numbers to a target.

rollouts run countdown --out runs/countdown
"""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.environments.countdown import Countdown, countdown_prompts, countdown_reward, load_countdown


def recipe(
    endpoint: Endpoint,
    *,
    data: Path | None = None,
    prompts: int = 2000,
    numbers: int = 3,
    format_reward: float = 0.0,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    max_new_tokens: int = 1024,
    keep: Literal["spread", "all"] = "spread",
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Rows from ``data``, or generated problems."""
    made_up = islice(countdown_prompts(seed, numbers=numbers), prompts)
    return agent_recipe(
        "countdown",
        endpoint,
        Countdown,
        made_up if data is None else load_countdown(data, limit=prompts),
        reward_fn=partial(countdown_reward, format_reward=format_reward),
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        max_new_tokens=max_new_tokens,
        max_turns=1,
        keep=keep,
        batches=batches,
        seed=seed,
    )
