"""Guess a number, with a reward for every guess.

rollouts run guess --out runs/guess
"""

from itertools import islice
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.environments.guess import GuessEnvironment, guess_prompts, guess_reward


@recipe_defaults(max_new_tokens=128)
def recipe(
    endpoint: Endpoint,
    *,
    prompts: int = 2000,
    high: int = 100,
    guesses: int = 8,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Made-up games."""
    return agent_recipe(
        "guess",
        endpoint,
        GuessEnvironment,
        islice(guess_prompts(seed, high=high, guesses=guesses), prompts),
        reward_fn=guess_reward,
        max_turns=guesses,
        seed=seed,
        **options,
    )
