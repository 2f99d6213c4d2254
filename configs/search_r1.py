"""Search-R1: questions answered in one assistant turn, with search results between tags.

rollouts run search_r1 --out runs/search_r1
"""

from functools import partial
from pathlib import Path
from typing import Unpack

import attrs

from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.environments.search import Index, load_documents, made_up_world
from rollouts.recipes.environments.search_r1 import (
    STOP,
    RetrievalServer,
    Retrieve,
    SearchR1Environment,
    instructed,
    load_search_r1,
    search_r1_reward,
)


@recipe_defaults(temperature=1.0, max_new_tokens=512, over_sampling_factor=3.0, in_flight=384)
def recipe(
    endpoint: Endpoint,
    *,
    data: str | None = None,
    input_key: str | None = None,
    label_key: str | None = None,
    corpus: Path | None = None,
    retriever: str | None = None,
    top: int = 3,
    limit: int | None = None,
    people: int = 40,
    max_turns: int = 4,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Questions from ``data``, searched in ``corpus`` or by the server ``retriever``; or a generated world.

    The defaults are for asynchronous training, see ``retool``.
    """
    if corpus is not None and retriever is not None:
        raise ConfigError.of("options corpus, retriever", (corpus, retriever), "one of them")
    if (data is None) != (corpus is None and retriever is None):
        got = (data, corpus, retriever)
        raise ConfigError.of("options data, corpus, retriever", got, "data and one of the others, or none of the three")
    documents, questions = made_up_world(seed, people=people)
    prompts = [attrs.evolve(prompt, prompt=instructed(str(prompt.prompt))) for prompt in questions]
    if data is not None:
        prompts = load_search_r1(data, limit=limit, prompt=input_key, label=label_key)
    if corpus is not None:
        documents = load_documents(corpus)
    retrieve: Retrieve = RetrievalServer(retriever) if retriever is not None else Index(documents).find
    return agent_recipe(
        "search_r1",
        endpoint,
        partial(SearchR1Environment, retrieve, top=top),
        prompts,
        reward_fn=search_r1_reward,
        max_turns=max_turns,
        seed=seed,
        stop=STOP,
        dialect="plain",
        **options,
    )
