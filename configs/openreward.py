"""OpenReward environments with the configuration and the rows of its training kit.

    python -m rollouts.recipes.environments.openreward.prepare_tasks --config train_config.yaml --output tasks.jsonl
    rollouts run openreward --endpoint http://HOST:30000 --model Qwen/Qwen3-4B \\
        --set config=train_config.yaml --data tasks.jsonl --out runs/openreward
"""

import os
from functools import partial
from pathlib import Path

import attrs

from rollouts.dtypes import Endpoint
from rollouts.environments.ors import ORSServer
from rollouts.recipe import Recipe
from rollouts.recipes.environments.openreward import (
    KitEnvironment,
    Trajectories,
    generate,
    group_reward,
    load_settings,
    own_reward,
)
from rollouts.recipes.environments.openreward.config import KEY
from rollouts.training import DataBuffer, RolloutConfig, load_prompts


def recipe(
    endpoint: Endpoint,
    *,
    config: Path,
    data: Path,
    batch_size: int = 32,
    n_samples_per_prompt: int = 16,
    over_sampling_factor: float = 1.5,
    temperature: float = 1.0,
    max_new_tokens: int = 4096,
    trajectories: Path | None = None,
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Rows of ``data`` in the environments of ``config``; ``trajectories`` is the file of exported trajectories."""
    settings = load_settings(config)
    sampling = attrs.evolve(endpoint.sampling, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    endpoint = attrs.evolve(endpoint, sampling=sampling)
    prompts = load_prompts(data)
    for prompt in prompts:
        settings.of(prompt.metadata.get("env_name"))
    servers: dict[str, ORSServer] = {name: settings.server(name) for name in settings.environments}
    compares = any(entry.group_score for entry in settings.environments.values())
    return Recipe(
        name="openreward",
        config=RolloutConfig(
            batch_size=batch_size,
            n_samples_per_prompt=n_samples_per_prompt,
            over_sampling_factor=over_sampling_factor,
            generate_fn=partial(
                generate,
                settings=settings,
                endpoint=endpoint,
                tokenizer=endpoint.model,
                trajectories=None if trajectories is None else Trajectories(trajectories, key=os.environ.get(KEY)),
            ),
            reward_fn=partial(group_reward if compares else own_reward, settings=settings),
            group_rm=compares,
        ),
        data_buffer=DataBuffer(prompts, seed=seed),
        endpoint=endpoint,
        tokenizer=endpoint.model,
        environment_cls=partial(KitEnvironment, next(iter(servers.values()))),
        batches=batches,
        seed=seed,
    )
