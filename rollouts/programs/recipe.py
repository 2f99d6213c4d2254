"""Recipes whose agent is a program or an async function."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Unpack

import attrs

from rollouts.base.validators import is_int
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError
from rollouts.programs.gateway.address import PublicAddress
from rollouts.programs.gateway.session import SessionLimits
from rollouts.programs.gateway.tree import Training
from rollouts.programs.generate import AgentFunction, SandboxChoice, generate_function_batch, generate_program_batch
from rollouts.programs.launchers.base import Program
from rollouts.programs.launchers.workspace import Workspace
from rollouts.programs.warm import WarmSandboxes
from rollouts.recipe import AllOptions, Recipe, assembled_recipe, named_options

__all__ = ["function_recipe", "opened_ahead", "program_recipe"]


def program_recipe(
    name: str,
    endpoint: Endpoint,
    program: Program,
    prompts: Iterable[Any],
    *,
    sandbox: SandboxChoice,
    gateway: PublicAddress | None = None,
    workspace: Workspace | None = None,
    limits: SessionLimits | None = None,
    training: Training | None = None,
    context_window: int | None = None,
    warm: int | None = 0,
    **options: Unpack[AllOptions],
) -> Recipe:
    """A recipe whose agent is a program, started in a sandbox for each rollout.

    Args:
        name: name of the recipe.
        endpoint: the model's endpoint; its ``sampling`` as for :func:`~rollouts.recipe.agent_recipe`.
        program: turns task and model server into a command, e.g. ``rollouts.programs.claude_code``.
        prompts: the data.
        sandbox: this and the arguments down to ``context_window`` are as for
            :func:`~rollouts.training.program_rollout_to_samples`.
        warm: as for :func:`opened_ahead`.
        **options: those of :func:`~rollouts.recipe.agent_recipe`; ``limits.max_calls`` replaces ``max_turns``.

    Raises:
        ConfigError: an argument is unknown or wrong; the message names it.
    """
    bound = named_options(
        gateway=gateway, workspace=workspace, limits=limits, training=training, context_window=context_window
    )
    generate_fn = functools.partial(generate_program_batch, program=program, sandbox=sandbox, **bound)
    return opened_ahead(assembled_recipe(program_recipe, name, endpoint, generate_fn, prompts, options), sandbox, warm)


def opened_ahead(recipe: Recipe, sandbox: SandboxChoice, warm: int | None) -> Recipe:
    """A recipe of programs whose sandboxes are opened before their rollouts begin.

    Args:
        recipe: it takes ``sandbox``.
        sandbox: its kind, or the function that chooses it.
        warm: how many are open ahead; 0 for none. ``None``: those of one prompt, unless a sampler chooses the prompts,
            whose order is not known.

    Raises:
        ConfigError: ``warm`` is negative, or given with a sampler.
    """
    copies = recipe.config.n_samples_per_prompt
    if warm is not None and not is_int(warm, 0):
        raise ConfigError.of("warm", warm, "an integer >= 0, or None")
    if warm == 0 or (warm is None and recipe.data_buffer.sampler is not None):
        return recipe
    queue = WarmSandboxes(sandbox, recipe.data_buffer, ahead=copies if warm is None else warm, copies=copies)
    return attrs.evolve(recipe.with_options(sandbox=queue), lifetime=queue)


def function_recipe(
    name: str,
    endpoint: Endpoint,
    function: AgentFunction,
    prompts: Iterable[Any],
    *,
    limits: SessionLimits | None = None,
    training: Training | None = None,
    context_window: int | None = None,
    **options: Unpack[AllOptions],
) -> Recipe:
    """A recipe whose agent is the user's async function; see :func:`program_recipe`.

    Args:
        name: name of the recipe.
        endpoint: the model's endpoint; its ``sampling`` as for :func:`~rollouts.recipe.agent_recipe`.
        function: ``async def agent(client, prompt)``; see :func:`~rollouts.training.function_rollout_to_samples`.
        prompts: the data.
        limits: this and the arguments down to ``context_window`` are those of that function.
        **options: those of :func:`~rollouts.recipe.agent_recipe`.
    """
    bound = named_options(limits=limits, training=training, context_window=context_window)
    generate_fn = functools.partial(generate_function_batch, function=function, **bound)
    return assembled_recipe(function_recipe, name, endpoint, generate_fn, prompts, options)
