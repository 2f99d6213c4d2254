"""Questions about documents, with search and read as tools.

rollouts run search --out runs/search
"""

from functools import partial
from pathlib import Path
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.environments.search import (
    Index,
    SearchEnvironment,
    load_documents,
    load_questions,
    made_up_world,
    search_reward,
)


@recipe_defaults(max_new_tokens=512)
def recipe(
    endpoint: Endpoint,
    *,
    data: Path | None = None,
    input_key: str | None = None,
    label_key: str | None = None,
    corpus: Path | None = None,
    people: int = 40,
    partial_credit: float = 0.0,
    max_turns: int = 8,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Questions from ``data`` about the documents of ``corpus``, or a generated world."""
    if (data is None) != (corpus is None):
        raise ConfigError.of("options data, corpus", (data, corpus), "both, or neither for a made-up world")
    documents, questions = made_up_world(seed, people=people)
    if data is not None and corpus is not None:
        documents, questions = load_documents(corpus), load_questions(data, prompt=input_key, label=label_key)
    return agent_recipe(
        "search",
        endpoint,
        partial(SearchEnvironment, Index(documents)),
        questions,
        reward_fn=partial(search_reward, partial_credit=partial_credit),
        max_turns=max_turns,
        seed=seed,
        **options,
    )
