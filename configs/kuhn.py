"""Kuhn poker by self-play: both seats are the model.

rollouts run kuhn --out runs/kuhn
"""

from itertools import islice
from typing import Unpack

from rollouts.dtypes import Endpoint, Limits
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.environments.kuhn import kuhn_deals, play
from rollouts.seats import Seat, play_recipe


@recipe_defaults(max_new_tokens=64)
def recipe(endpoint: Endpoint, *, prompts: int = 2000, seed: int = 0, **options: Unpack[RecipeOptions]) -> Recipe:
    """Made-up deals."""
    seat = Seat(limits=Limits(max_turns=2, on_cut="continue"))
    deals = islice(kuhn_deals(seed), prompts)
    return play_recipe("kuhn", endpoint, play, deals, seats={"player0": seat, "player1": seat}, seed=seed, **options)
