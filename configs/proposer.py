"""A proposer and solvers: the solvers of one problem are compared with each other, proposers by group.

rollouts run proposer --out runs/proposer
"""

from itertools import islice
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.environments.proposer import play, proposals
from rollouts.seats import Seat, play_recipe


@recipe_defaults(max_new_tokens=64)
def recipe(endpoint: Endpoint, *, prompts: int = 2000, seed: int = 0, **options: Unpack[RecipeOptions]) -> Recipe:
    """Requests for problems."""
    seats = {"proposer": Seat(), "solver": Seat()}
    data = islice(proposals(seed), prompts)
    return play_recipe("proposer", endpoint, play, data, seats=seats, by={"solver": "episode"}, seed=seed, **options)
