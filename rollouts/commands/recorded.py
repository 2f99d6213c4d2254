"""A recipe whose rollouts record everything that they receive from outside: ``rollouts run --record``.

Invariant: a recipe whose rollouts cannot be recorded is refused before a prompt is taken. This module knows no folder.
"""

from __future__ import annotations

import anyio.to_thread
import attrs

from rollouts.errors import ConfigError
from rollouts.inference.shared import shared_policy
from rollouts.recipe import Recipe
from rollouts.runs.journal import Journal
from rollouts.runs.recording import check_recordable as check_generate_fn
from rollouts.runs.recording import recorded as recorded_fn
from rollouts.training.agent_integration import resuming

__all__ = ["check_recordable", "recorded"]


def check_recordable(recipe: Recipe) -> None:
    """Check that everything the rollouts of a recipe receive from outside can be recorded.

    Raises:
        ConfigError: it cannot.
    """
    recipe.environment_for("--record")
    check_generate_fn(recipe.config.generate_fn)
    endpoint = recipe.bound.get("endpoint", recipe.endpoint)
    if endpoint.lora is not None:
        raise ConfigError.of("--record", endpoint.lora, "an endpoint without lora: its rollouts share one policy")


async def recorded(recipe: Recipe, journal: Journal) -> Recipe:
    """The recipe with a generate function that records everything its rollouts receive from outside."""
    bound, policy = recipe.bound, recipe.bound.get("policy")
    renderer = await anyio.to_thread.run_sync(recipe.renderer)
    if policy is None:
        policy = shared_policy(bound.get("endpoint", recipe.endpoint), renderer.vocab_size)
    environment_cls = bound.get("environment_cls") or recipe.environment_for("--record")
    generate_fn = recorded_fn(recipe.config.generate_fn, journal, environment_cls, resuming(policy, renderer.decode))
    return attrs.evolve(recipe, config=attrs.evolve(recipe.config, generate_fn=generate_fn))
