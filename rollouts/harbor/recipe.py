"""The recipe of a folder of Harbor tasks, for programs of ours and for agents of Harbor."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import attrs

from rollouts.dtypes import Endpoint, Prompt
from rollouts.errors import ConfigError
from rollouts.harbor.boxes import BoxOptions, TaskBoxes
from rollouts.harbor.check import CHECKED, stored_rungs
from rollouts.harbor.tasks import HarborTask, load_tasks, prompts_of, task_of
from rollouts.harbor.trial import HarborAgent
from rollouts.harbor.verdict import Rung
from rollouts.harbor.workspace import HarborWorkspace, rungs_of
from rollouts.programs import Program
from rollouts.programs.gateway.session import SessionLimits
from rollouts.programs.generate import SandboxChoice, check_program, program_rollout_to_samples
from rollouts.programs.recipe import function_recipe, opened_ahead
from rollouts.recipe import AllOptions, Recipe, assembled_recipe
from rollouts.training.agent_integration import generate_all
from rollouts.training.types import Sample

__all__ = ["Grade", "generate_harbor_batch", "harbor_recipe", "harbor_rollout_to_samples"]

Grade: TypeAlias = Literal["auto", "separate", "carry", "kill", "keep"]


async def harbor_rollout_to_samples(
    prompt: Prompt,
    *,
    workspace: HarborWorkspace,
    sandbox: SandboxChoice | None = None,
    limits: SessionLimits | None = None,
    **options: Any,
) -> list[Sample]:
    """:func:`~rollouts.programs.program_rollout_to_samples` in the box of the prompt's task, within its time.

    Args:
        prompt: one of :func:`~rollouts.harbor.tasks.prompts_of`.
        workspace: chooses the box, fills and grades it.
        sandbox: opens the boxes that ``workspace`` chooses, e.g. ahead.
        limits: ``max_seconds`` is at most ``[agent].timeout_sec`` of the task.
        **options: of that function.
    """
    limits = limits or SessionLimits()
    task = task_of(prompt.metadata, workspace.tasks)
    seconds = task.config.agent.timeout_sec
    if seconds is not None:
        limits = attrs.evolve(limits, max_seconds=min(limits.max_seconds, seconds))
    samples = await program_rollout_to_samples(
        prompt, sandbox=sandbox or workspace.kind_for, workspace=workspace, limits=limits, **options
    )
    failure = samples[-1].failure
    if failure is not None and failure.cause == "environment_step":  # while the program ran: no tests were begun
        workspace.lost.note(task.name, "died", checked=workspace.checked)
    return samples


async def generate_harbor_batch(prompts: Iterable[Prompt], **options: Any) -> list[Sample]:
    """Run :func:`harbor_rollout_to_samples` with ``options`` for all prompts concurrently."""
    return await generate_all(harbor_rollout_to_samples, prompts, options)


async def _check(bound: Mapping[str, Any], prompts: Iterable[Prompt]) -> None:
    await check_program({**bound, "sandbox": bound["workspace"].kind_for}, prompts)


generate_harbor_batch.check = _check  # type: ignore[attr-defined]  # the preflight of a recipe calls it


def harbor_recipe(
    name: str,
    endpoint: Endpoint,
    folder: str | Path,
    *,
    agent: str | None = None,
    program: Program | None = None,
    grade: Grade = "auto",
    boxes: BoxOptions | None = None,
    variables: tuple[str, ...] = (),
    reward_key: str | None = None,
    agent_options: Mapping[str, Any] | None = None,
    limits: SessionLimits | None = None,
    warm: int | None = None,
    **options: Unpack[AllOptions],
) -> Recipe:
    """A recipe over the tasks of a folder.

    Args:
        name: name of the recipe.
        endpoint: the model's endpoint.
        folder: a task, or a folder of tasks.
        agent: an agent of Harbor, by its name there, played in Harbor's Trial.
        program: in its place, a program of ours.
        grade: the rung of every task whose verifier is shared; ``"auto"``: the strictest that serves it, as
            ``rollouts check-task`` stored it. A task with steps is graded on Harbor's rung then.
        boxes: choices for the boxes of all tasks.
        variables: names of variables of this process that tasks may read.
        reward_key: the key of the reward that is trained; by default the only one, or ``reward``.
        agent_options: further arguments of the agent's class in Harbor.
        limits: of each session.
        warm: boxes that are opened ahead for a program, as for :func:`~rollouts.programs.recipe.opened_ahead`; Harbor
            opens those of its agents.
        **options: those of :func:`~rollouts.recipe.agent_recipe`.

    Raises:
        ConfigError: a task or an option is wrong, or a task was not checked.
    """
    if (agent is None) == (program is None):
        raise ConfigError.of("agent, program", (agent, program), "one of the two")
    tasks = load_tasks(folder)
    named = {task.name: task for task in tasks}
    boxes = boxes or BoxOptions()
    rungs = _rungs(tasks, grade, Path(folder) / CHECKED)
    prompts = prompts_of(tasks)
    shared: dict[str, Any] = {"rungs": rungs, "reward_key": reward_key, "checked": grade == "auto"}
    if agent is not None:
        if warm:
            raise ConfigError.of("warm", warm, "None: Harbor opens the boxes of its agents")
        play = HarborAgent(agent, named, boxes, options=agent_options or {}, variables=variables, **shared)
        return function_recipe(name, endpoint, play, prompts, limits=limits, **options)
    values = _values_of(variables)
    workspace = HarborWorkspace(named, TaskBoxes(boxes, values), variables=values, **shared)
    generate_fn = functools.partial(generate_harbor_batch, program=program, workspace=workspace)
    if limits is not None:
        generate_fn = functools.partial(generate_fn, limits=limits)
    recipe = assembled_recipe(harbor_recipe, name, endpoint, generate_fn, prompts, options)
    return opened_ahead(recipe, workspace.kind_for, warm)


def _rungs(tasks: list[HarborTask], grade: Grade, stored: Path) -> dict[str, Rung]:
    if grade == "auto":
        with_steps: dict[str, Rung] = {task.name: "keep" for task in tasks if task.config.steps}
        return with_steps | stored_rungs([task for task in tasks if not task.config.steps], stored)
    rungs: dict[str, Rung] = {}
    for task in tasks:
        possible: tuple[Rung, ...] = ("kill", "keep") if task.config.steps else rungs_of(task)
        rungs[task.name] = grade if grade in possible else possible[-1]
    return rungs


def _values_of(names: tuple[str, ...]) -> dict[str, str]:
    values = {}
    for name in names:
        if name not in os.environ:
            raise ConfigError.of("variables", name, "a variable that is set")
        values[name] = os.environ[name]
    return values
