"""A calculator recipe with a witness file, which records every call of the reward before the run gets its result.

Used by ``scripts/faults/crash``; the file survives the death of the run, and is independent of its journal.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import attrs

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe
from rollouts.recipes.configs.calculator import exact_answer_reward
from rollouts.recipes.configs.calculator import recipe as calculator
from rollouts.recipes.configs.calculator_program import recipe as calculator_program
from rollouts.recipes.configs.calculator_program import workspace_reward
from rollouts.training import Sample


def witnessed_reward(sample: Sample, *, witness: Path, reward_fn: Callable[[Sample], float]) -> float:
    """The recipe's reward; one line ``pid index crc`` a call, written with one ``write``."""
    line = f"{os.getpid()} {sample.index} {zlib.crc32(sample.token_column.tobytes())}\n"
    file = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
    return reward_fn(sample)


def recipe(
    endpoint: Endpoint,
    *,
    witness: Path,
    programs: bool = False,
    in_flight: int | None = None,
    sampler: Literal["uniform", "pass_rate", "pools"] = "uniform",
    batch_size: int = 4,
    n_samples_per_prompt: int = 4,
    prompts: int = 300,
    sampling_seed: int = 0,
) -> Recipe:
    """Small groups, endless data in a fixed order, independent of the samples; programs: a process for each rollout."""
    made = (calculator_program if programs else calculator)(
        endpoint,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        over_sampling_factor=1.5 if in_flight is None else 3.0,
        in_flight=in_flight,
        sampler=sampler,
        prompts=prompts,
        epochs=None,
    )
    sampling = attrs.evolve(made.endpoint.sampling, seed=sampling_seed)
    endpoint = attrs.evolve(made.endpoint, sampling=sampling)
    agents = made.config.generate_fn
    assert isinstance(agents, partial)
    generate_fn = partial(agents, endpoint=endpoint)
    reward_fn = workspace_reward if programs else exact_answer_reward
    reward = partial(witnessed_reward, witness=witness, reward_fn=reward_fn)
    config = attrs.evolve(made.config, generate_fn=generate_fn, reward_fn=reward)
    return attrs.evolve(made, name="crash", endpoint=endpoint, config=config)
