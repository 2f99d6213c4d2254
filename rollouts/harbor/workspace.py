"""The workspace of a Harbor task for programs of ours: filled before the agent, graded after it.

Invariant: a rollout has the reward that the tests of its task wrote, and its sample names the rung on which they ran;
without a verdict the rollout fails with the cause ``verifier``. A task that only Harbor's Trial plays is refused before
work starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.harbor.grading import Box, box_in, fill, grade, healthy, open_box
from rollouts.harbor.tasks import HarborTask, resolved_env, task_of
from rollouts.harbor.verdict import RUNGS, LostVerdicts, NoVerdict, Rung
from rollouts.sandboxes import RunningSandbox, Sandbox

__all__ = ["HarborWorkspace", "KindOf", "box_env", "check_playable", "fresh_box", "rungs_of", "verifier_env"]

KindOf: TypeAlias = Callable[[HarborTask, bool], Awaitable[Sandbox]]
"""The kind of sandbox for a task: of its agent, or with ``True`` of its separate verifier; e.g.
:class:`~rollouts.harbor.boxes.TaskBoxes`."""


def check_playable(task: HarborTask) -> None:
    """Raise unless a program of ours can play a task.

    Raises:
        ConfigError: a field of the task needs Harbor's Trial, by name.
    """
    environment = task.config.environment
    for name, value in (
        ("steps", task.config.steps),
        ("environment.mcp_servers", environment.mcp_servers),
        ("environment.skills_dir", environment.skills_dir),
    ):
        if value:
            expected = "none: Harbor's Trial plays it with an agent of Harbor, and a program of ours cannot"
            raise ConfigError.of(f"{task.name}: {name}", f"{len(value)} of it", expected)


def rungs_of(task: HarborTask) -> tuple[Rung, ...]:
    """The rungs that a task may be graded on, the strictest first; the last is Harbor's."""
    return ("separate",) if task.verifier_place() is not None else RUNGS[1:]


def box_env(task: HarborTask, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of an agent's box."""
    return resolved_env(task.config.environment.env, variables, f"{task.name}: environment.env")


def verifier_env(task: HarborTask, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a task's tests."""
    return resolved_env(task.config.verifier.env, variables, f"{task.name}: verifier.env")


@contextlib.asynccontextmanager
async def fresh_box(task: HarborTask, kind_of: KindOf, rung: Rung) -> AsyncIterator[Box]:
    """A new box of a task: the verifier's on the rung ``separate``, else of the agent's kind."""
    place = task.verifier_place() if rung == "separate" else None
    environment = task.config.environment if place is None else place.environment
    kind = await kind_of(task, place is not None)
    async with open_box(kind, environment.workdir, seconds=environment.build_timeout_sec) as box:
        yield box


@attrs.frozen
class HarborWorkspace:
    """Fills the boxes of tasks, and grades them; a :class:`~rollouts.programs.launchers.workspace.Workspace`."""

    tasks: Mapping[str, HarborTask] = attrs.field(repr=lambda tasks: f"{len(tasks)} tasks")
    """By name, which is ``metadata["harbor"]["task"]`` of the prompt."""
    kind_of: KindOf = attrs.field(repr=False)
    rungs: Mapping[str, Rung]
    """The rung of each task by its name, e.g. as ``check-task`` stored it."""
    variables: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """Values that ``${VAR}`` of a task may read."""
    reward_key: str | None = None
    """The key of the reward that is trained; by default the only one, or ``reward``."""
    checked: bool = False
    """Whether the rungs are those of a check, so that every task is known to get verdicts."""
    lost: LostVerdicts = attrs.field(factory=LostVerdicts, eq=False, repr=lambda lost: "counted")
    """Counts the verdicts."""

    def __attrs_post_init__(self) -> None:
        for name, task in self.tasks.items():
            check_playable(task)
            box_env(task, self.variables)
            verifier_env(task, self.variables)
            rung = self.rungs.get(name)
            if rung not in rungs_of(task):
                raise ConfigError.of(f"HarborWorkspace.rungs[{name!r}]", rung, f"one of {', '.join(rungs_of(task))}")

    async def kind_for(self, prompt: Prompt) -> Sandbox:
        """The kind of sandbox for a prompt, for :func:`~rollouts.programs.program_rollout_to_samples`."""
        return await self.kind_of(task_of(prompt.metadata, self.tasks), False)

    async def fill(self, prompt: Prompt, place: RunningSandbox) -> Box:
        """Write the loose files of the prompt's task, and wait for its healthcheck."""
        task = task_of(prompt.metadata, self.tasks)
        environment = task.config.environment
        box = box_in(place, await self.kind_for(prompt), environment.workdir)
        await fill(task, box)
        await healthy(box, environment.healthcheck)
        return box

    async def take(self, prompt: Prompt, place: RunningSandbox, filled: Box) -> dict[str, Any]:
        """Grade the box: the reward, and ``metadata["verdict"]`` with all rewards and the rung.

        Raises:
            NoVerdict: there is none.
        """
        task = task_of(prompt.metadata, self.tasks)
        rung = self.rungs[task.name]
        try:
            verdict = await grade(
                task,
                filled,
                rung,
                lambda: fresh_box(task, self.kind_of, rung),
                env=verifier_env(task, self.variables),
                reward_key=self.reward_key,
            )
        except NoVerdict as error:
            self.lost.note(task.name, error.reason, checked=self.checked)
            raise
        self.lost.note(task.name, None, checked=self.checked)
        return {"reward": verdict.reward, "verdict": verdict.metadata()}
