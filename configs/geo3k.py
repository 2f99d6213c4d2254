"""Problems with images, such as Geometry3K.

    rollouts run geo3k --endpoint http://HOST:30000 --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --data train.parquet --out runs/geo3k
"""

from pathlib import Path
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.environments.geo3k import Geo3kEnvironment, load_geo3k
from rollouts.rewards import boxed_math


@recipe_defaults(temperature=1.0, max_new_tokens=4096)
def recipe(
    endpoint: Endpoint,
    *,
    data: str,
    input_key: str | None = None,
    label_key: str | None = None,
    folder: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Rows of ``images``, ``problem`` and ``answer``; image files are read from ``folder`` only."""
    return agent_recipe(
        "geo3k",
        endpoint,
        Geo3kEnvironment,
        load_geo3k(data, folder=folder, limit=limit, prompt=input_key, label=label_key),
        reward_fn=boxed_math,
        max_turns=1,
        seed=seed,
        images=True,
        **options,
    )
