"""Problems with images, such as Geometry3K.

    rollouts run geo3k --endpoint http://HOST:30000 --model Qwen/Qwen2.5-VL-7B-Instruct \\
        --data train.parquet --out runs/geo3k
"""

from pathlib import Path
from typing import Literal

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.environments.geo3k import Geo3kEnvironment, load_geo3k
from rollouts.rewards import boxed_math


def recipe(
    endpoint: Endpoint,
    *,
    data: str,
    folder: Path | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int = 4096,
    keep: Literal["spread", "all"] = "spread",
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Rows of ``images``, ``problem`` and ``answer``; ``folder`` is the only one whose image files are read."""
    return agent_recipe(
        "geo3k",
        endpoint,
        Geo3kEnvironment,
        load_geo3k(data, folder=folder, limit=limit),
        reward_fn=boxed_math,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_turns=1,
        keep=keep,
        batches=batches,
        seed=seed,
        images=True,
    )
