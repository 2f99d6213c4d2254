"""OpenReward environments with the configuration and the rows of its training kit.

    python -m rollouts.recipes.environments.openreward.prepare_tasks --config train_config.yaml --output tasks.jsonl
    rollouts run openreward --endpoint http://HOST:30000 --model Qwen/Qwen3-4B \\
        --set config=train_config.yaml --data tasks.jsonl --out runs/openreward
"""

import os
from functools import partial
from pathlib import Path
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.environments.ors import ORSServer
from rollouts.recipe import Recipe, RecipeOptions, assembled_recipe, recipe_defaults
from rollouts.recipes.environments.openreward import (
    KitEnvironment,
    Trajectories,
    generate,
    group_reward,
    load_settings,
    own_reward,
)
from rollouts.recipes.environments.openreward.config import KEY
from rollouts.training import load_prompts


@recipe_defaults(n_samples_per_prompt=16, temperature=1.0, max_new_tokens=4096, keep="all")
def recipe(
    endpoint: Endpoint,
    *,
    config: Path,
    data: Path,
    trajectories: Path | None = None,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Rows of ``data`` in the environments of ``config``; ``trajectories`` is the file of exported trajectories."""
    settings = load_settings(config)
    prompts = load_prompts(data)
    for prompt in prompts:
        settings.of(prompt.metadata.get("env_name"))
    servers: dict[str, ORSServer] = {name: settings.server(name) for name in settings.environments}
    compares = any(entry.group_score for entry in settings.environments.values())
    exported = None if trajectories is None else Trajectories(trajectories, key=os.environ.get(KEY))
    reward_fn = partial(group_reward if compares else own_reward, settings=settings)
    return assembled_recipe(
        recipe,
        "openreward",
        endpoint,
        partial(generate, settings=settings, trajectories=exported),
        prompts,
        {"reward_fn": reward_fn, "group_rm": compares, "seed": seed, **options},
        partial(KitEnvironment, next(iter(servers.values()))),
    )
