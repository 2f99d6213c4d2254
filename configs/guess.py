"""Guess a number, with a reward for every guess.

rollouts run guess --out runs/guess
"""

from itertools import islice
from typing import Literal

from rollouts.dtypes import Endpoint, OnRewrite
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.environments.guess import GuessEnvironment, guess_prompts, guess_reward


def recipe(
    endpoint: Endpoint,
    *,
    prompts: int = 2000,
    high: int = 100,
    guesses: int = 8,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    max_new_tokens: int = 128,
    keep: Literal["spread", "all"] = "spread",
    history: OnRewrite = "append",
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Made-up games."""
    return agent_recipe(
        "guess",
        endpoint,
        GuessEnvironment,
        islice(guess_prompts(seed, high=high, guesses=guesses), prompts),
        reward_fn=guess_reward,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        max_new_tokens=max_new_tokens,
        max_turns=guesses,
        keep=keep,
        history=history,
        batches=batches,
        seed=seed,
    )
