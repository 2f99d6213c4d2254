"""Best of four with a selector, on the problems of the calculator without its tools.

rollouts run selector --out runs/selector
"""

from itertools import islice
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.environments.calculator import calculator_prompts
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.environments.selector import play
from rollouts.seats import Seat, play_recipe


@recipe_defaults(max_new_tokens=128)
def recipe(endpoint: Endpoint, *, prompts: int = 2000, seed: int = 0, **options: Unpack[RecipeOptions]) -> Recipe:
    """Made-up sums."""
    seats = {"solver": Seat(), "selector": Seat()}
    data = islice(calculator_prompts(seed), prompts)
    return play_recipe("selector", endpoint, play, data, seats=seats, seed=seed, **options)
