"""Recipes whose rollouts are plays of several agents."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError
from rollouts.recipe import AllOptions, Recipe, assembled_recipe
from rollouts.seats.play import PlayFn, comparisons_of, generate_play_batch
from rollouts.seats.seat import Seat, check_seats
from rollouts.training.comparisons import Comparison

__all__ = ["play_recipe"]


def play_recipe(
    name: str,
    endpoint: Endpoint,
    play: PlayFn,
    prompts: Iterable[Any],
    *,
    seats: Mapping[str, Seat],
    by: Comparison = "seat",
    **options: Unpack[AllOptions],
) -> Recipe:
    """A recipe whose rollouts are plays of several agents.

    Args:
        name: name of the recipe.
        endpoint: the model's endpoint; its ``sampling`` as for :func:`~rollouts.recipe.agent_recipe`.
        play: ``async def play(seats, prompt)``.
        prompts: the data.
        seats: the agents by name.
        by: the rewards that are compared, by ``keep="spread"`` and by each trainer.
        **options: those of :func:`~rollouts.recipe.agent_recipe`; the limits are those of each seat.

    Raises:
        ConfigError: an argument is unknown or wrong; the message names it.
    """
    if endpoint.priority:
        raise ConfigError.of("Endpoint.priority", True, "False: the requests of seats have no priorities")
    compared = comparisons_of(check_seats(seats), by)
    generate_fn = functools.partial(generate_play_batch, play=play, seats=seats, by=compared)
    return assembled_recipe(play_recipe, name, endpoint, generate_fn, prompts, options)
