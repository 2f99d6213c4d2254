"""A recipe of one turn for the tests of trainers, and a reward that keeps what it scored."""

from __future__ import annotations

from typing import Any

from rollouts.dtypes import Endpoint, Prompt
from rollouts.environments import SingleTurnEnvironment
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.configs.calculator import exact_answer_reward
from rollouts.seats import Seat, play_recipe
from rollouts.training import Sample

PLAYED: list[Sample] = []
"""Samples that :func:`kept` scored since a test emptied the list."""


def kept(sample: Sample) -> float:
    """A reward that differs between rollouts; it keeps the samples, for the comparison with what a trainer got."""
    PLAYED.append(sample)
    return len(sample) / 1024 + exact_answer_reward(sample)


def is_one(sample: Sample) -> float:
    return float(sample.response.startswith("1"))


async def asks_none(seats: Any, prompt: Prompt) -> None:
    """A play that is never played."""


def recipe(endpoint: Endpoint, *, long: int = 0, seats: int = 0, by: str = "seat") -> Recipe:
    """Whole groups of the digits 1 to 3; all groups are kept. The first ``long`` prompts have 2,000 words.

    With ``seats`` its rollouts are plays of so many trained seats, compared as ``by`` says.
    """
    if seats:
        named = {f"player{number}": Seat() for number in range(seats)}
        return play_recipe("players", endpoint, asks_none, ["Begin."], seats=named, by=by)
    return agent_recipe(
        "digits",
        endpoint,
        SingleTurnEnvironment,
        [f"Say {number}." + " Please." * (2000 if number < long else 0) for number in range(40)],
        reward_fn=is_one,
        keep="all",
        shuffled=False,
        batch_size=2,
        n_samples_per_prompt=2,
    )
