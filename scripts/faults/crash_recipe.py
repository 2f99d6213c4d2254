"""A calculator recipe with a witness file, which records every call of the reward before the run gets its result.

Used by ``scripts/faults/crash``; the file survives the death of the run, and is independent of its journal.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import attrs

from rollouts.dtypes import Endpoint, Prompt
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import Recipe
from rollouts.recipes.configs.calculator import exact_answer_reward
from rollouts.recipes.configs.calculator import recipe as calculator
from rollouts.recipes.configs.calculator_program import recipe as calculator_program
from rollouts.recipes.configs.calculator_program import workspace_reward
from rollouts.seats import Seat, Seats, play_recipe
from rollouts.training import Sample
from rollouts.training.branching import generate_branched_batch
from scripts.faults.harbor_recipe import recipe as harbor_arithmetic


def witnessed_reward(sample: Sample, *, witness: Path, reward_fn: Callable[[Sample], float]) -> float:
    """The recipe's reward; one line ``pid index crc`` a call, written with one ``write``."""
    if (sample.seat, sample.conversation) not in (("", 0), ("white", 0)):
        return reward_fn(sample)  # one line a rollout
    line = f"{os.getpid()} {sample.index} {zlib.crc32(sample.token_column.tobytes())}\n"
    file = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
    return reward_fn(sample)


async def turns(seats: Seats, prompt: Prompt) -> None:
    """Three turns of two seats, and an episode with tools; the rewards are those of a zero-sum game."""
    white, black = seats.white.chat("You are white."), seats.black.chat()
    said = prompt.messages[-1].text
    for _ in range(3):
        said = (await white.ask(said[-200:] or "...")).text
        said = (await black.ask(said[-200:] or "...")).text
    run = await seats.white.run()
    white.reward = float(len(said) % 3 - 1)
    black.reward, run.reward = -white.reward, 0.0


def seated(endpoint: Endpoint, **options: Any) -> Recipe:
    """Two seats on the prompts of the calculator."""
    cook = Seat(environment_cls=CalculatorEnvironment)
    seats = {"white": cook, "black": Seat()}
    prompts = islice(calculator_prompts(0), options.pop("prompts"))
    return play_recipe("crash", endpoint, turns, prompts, seats=seats, keep="all", max_new_tokens=32, **options)


def reward_that_is_set(sample: Sample) -> float:
    """The reward of the play, or of the task's tests."""
    return float(sample.reward or 0.0)


def recipe(
    endpoint: Endpoint,
    *,
    witness: Path,
    programs: bool = False,
    seats: bool = False,
    branches: bool = False,
    harbor: str = "",
    tasks: Path | None = None,
    in_flight: int | None = None,
    sampler: Literal["uniform", "pass_rate", "pools"] = "uniform",
    batch_size: int = 4,
    n_samples_per_prompt: int = 4,
    prompts: int = 300,
    sampling_seed: int = 0,
) -> Recipe:
    """Small groups, endless data in a fixed order, independent of the samples; programs: a process for each rollout.

    branches: each rollout has two more, from after its first turn, where it has a second.
    harbor: the root of an image, in which a program plays tasks that are written to the folder tasks.
    """
    kind: Callable[..., Recipe] = calculator_program if programs else seated if seats else calculator
    if harbor and tasks is not None:
        kind = partial(harbor_arithmetic, root=harbor, tasks=tasks)
    made = kind(
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
    if branches:
        generate_fn = partial(generate_branched_batch, turn=1, n=3, **generate_fn.keywords)
    reward_fn = reward_that_is_set if seats or harbor else workspace_reward if programs else exact_answer_reward
    reward = partial(witnessed_reward, witness=witness, reward_fn=reward_fn)
    config = attrs.evolve(made.config, generate_fn=generate_fn, reward_fn=reward)
    return attrs.evolve(made, name="crash", endpoint=endpoint, config=config)
