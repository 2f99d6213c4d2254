"""Recipes whose agent is a program or an async function."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from rollouts.dtypes import Endpoint, OnRewrite
from rollouts.programs.gateway.address import PublicAddress
from rollouts.programs.gateway.session import SessionLimits
from rollouts.programs.gateway.tree import Training
from rollouts.programs.generate import AgentFunction, generate_function_batch, generate_program_batch
from rollouts.programs.launchers.base import Program
from rollouts.programs.launchers.workspace import Workspace
from rollouts.recipe import Recipe, assembled_recipe, named_options
from rollouts.sandboxes.base import Sandbox

__all__ = ["function_recipe", "program_recipe"]


def program_recipe(
    name: str,
    endpoint: Endpoint,
    program: Program,
    prompts: Iterable[Any],
    *,
    sandbox: Sandbox,
    gateway: PublicAddress | None = None,
    workspace: Workspace | None = None,
    limits: SessionLimits | None = None,
    training: Training | None = None,
    history: OnRewrite = "append",
    context_window: int | None = None,
    **options: Any,
) -> Recipe:
    """A recipe whose agent is a program, started in a sandbox for each rollout.

    Args:
        name: name of the recipe.
        endpoint: the model's endpoint; its ``sampling`` as for :func:`~rollouts.recipe.agent_recipe`.
        program: from task and model server to a command, e.g. ``rollouts.programs.launchers.claude_code``.
        prompts: the data.
        sandbox: this and the arguments down to ``context_window`` are those of
            :func:`~rollouts.training.program_rollout_to_samples`.
        **options: the other options of :func:`~rollouts.recipe.agent_recipe`; ``limits.max_calls`` replaces
            ``max_turns``.

    Raises:
        ConfigError: an argument is unknown or wrong; the message names it.
    """
    bound = named_options(
        gateway=gateway, workspace=workspace, limits=limits, training=training, context_window=context_window
    )
    generate_fn = functools.partial(generate_program_batch, program=program, sandbox=sandbox, history=history, **bound)
    return assembled_recipe(program_recipe, name, endpoint, generate_fn, prompts, **options)


def function_recipe(
    name: str,
    endpoint: Endpoint,
    function: AgentFunction,
    prompts: Iterable[Any],
    *,
    limits: SessionLimits | None = None,
    training: Training | None = None,
    history: OnRewrite = "append",
    context_window: int | None = None,
    **options: Any,
) -> Recipe:
    """A recipe whose agent is an async function of yours; see :func:`program_recipe`.

    Args:
        name: name of the recipe.
        endpoint: the model's endpoint; its ``sampling`` as for :func:`~rollouts.recipe.agent_recipe`.
        function: ``async def agent(client, prompt)``; see :func:`~rollouts.training.function_rollout_to_samples`.
        prompts: the data.
        limits: this and the arguments down to ``context_window`` are those of that function.
        **options: the other options of :func:`~rollouts.recipe.agent_recipe`.
    """
    bound = named_options(limits=limits, training=training, context_window=context_window)
    generate_fn = functools.partial(generate_function_batch, function=function, history=history, **bound)
    return assembled_recipe(function_recipe, name, endpoint, generate_fn, prompts, **options)
