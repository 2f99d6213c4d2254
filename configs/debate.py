"""A debate of two seats before a judge that is not trained, which may be another model.

rollouts run debate --out runs/debate --set judge_url=http://HOST:30000 --set judge_model=MODEL
"""

from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.environments.debate import QUESTIONS, play
from rollouts.seats import Seat, play_recipe


@recipe_defaults(max_new_tokens=256)
def recipe(
    endpoint: Endpoint,
    *,
    judge_url: str | None = None,
    judge_model: str | None = None,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """A few questions; the judge is the endpoint's own model unless a URL is given."""
    model = judge_model or endpoint.model
    judge = None if judge_url is None else Endpoint(model=model, base_url=judge_url)
    tokenizer = None if judge is None else model
    seats = {"pro": Seat(), "con": Seat(), "judge": Seat(endpoint=judge, tokenizer=tokenizer, trained=False)}
    return play_recipe("debate", endpoint, play, QUESTIONS, seats=seats, seed=seed, **options)
