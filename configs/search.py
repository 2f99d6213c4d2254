"""Questions about documents, with search and read as tools.

rollouts run search --out runs/search
"""

from functools import partial
from pathlib import Path
from typing import Literal

from rollouts.dtypes import Endpoint, OnRewrite
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.environments.search import (
    Index,
    SearchEnvironment,
    load_documents,
    load_questions,
    made_up_world,
    search_reward,
)


def recipe(
    endpoint: Endpoint,
    *,
    data: Path | None = None,
    corpus: Path | None = None,
    people: int = 40,
    partial_credit: float = 0.0,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    max_new_tokens: int = 512,
    max_turns: int = 8,
    keep: Literal["spread", "all"] = "spread",
    history: OnRewrite = "append",
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Questions from ``data`` about the documents of ``corpus``, or a generated world."""
    if (data is None) != (corpus is None):
        raise ConfigError.of("options data, corpus", (data, corpus), "both, or neither for a made-up world")
    documents, questions = made_up_world(seed, people=people)
    if data is not None and corpus is not None:
        documents, questions = load_documents(corpus), load_questions(data)
    return agent_recipe(
        "search",
        endpoint,
        partial(SearchEnvironment, Index(documents)),
        questions,
        reward_fn=partial(search_reward, partial_credit=partial_credit),
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        keep=keep,
        history=history,
        batches=batches,
        seed=seed,
    )
