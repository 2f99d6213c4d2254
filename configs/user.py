"""An agent with a calculator, and a simulated user that is not trained.

rollouts run user --out runs/user
"""

from itertools import islice
from typing import Unpack

from rollouts.dtypes import Endpoint, Limits
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.environments.user import errands, play
from rollouts.seats import Seat, play_recipe


@recipe_defaults(max_new_tokens=128)
def recipe(endpoint: Endpoint, *, prompts: int = 2000, seed: int = 0, **options: Unpack[RecipeOptions]) -> Recipe:
    """Made-up errands."""
    agent = Seat(environment_cls=CalculatorEnvironment, limits=Limits(max_turns=12, on_cut="continue"))
    seats = {"agent": agent, "user": Seat(trained=False)}
    return play_recipe("user", endpoint, play, islice(errands(seed), prompts), seats=seats, seed=seed, **options)
