"""The part of ``rollouts check-task`` for a folder of Harbor tasks: oracle and no-op on each rung."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.commands.arguments import BROKEN, in_loop
from rollouts.errors import ConfigError
from rollouts.harbor.boxes import BoxOptions, TaskBoxes
from rollouts.harbor.check import CHECKED, TaskCheck, check_tasks, save_checks
from rollouts.harbor.tasks import HarborTask, load_tasks
from rollouts.harbor.verdict import RUNGS
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.transcript import visible

__all__ = ["check_folder"]


def check_folder(
    folder: Path, options: Mapping[str, str], names: Sequence[str] | None = None, most: int | None = None
) -> int:
    """Check the tasks of a folder, print a table, and store the rungs in the folder.

    Args:
        folder: a task, or a folder of tasks.
        options: ``root``, ``store``, ``network``, ``ignore``, ``memory_mb`` and ``storage_mb`` of the boxes;
            ``variables`` (names, separated by commas) and ``reward_key``.
        names: only these tasks.
        most: only the first tasks.

    Returns:
        0 if a rung serves every task that programs of ours can play.
    """
    given = dict(options)
    variables = {name: os.environ.get(name, "") for name in given.pop("variables", "").split(",") if name}
    reward_key = given.pop("reward_key", None)
    boxes = TaskBoxes(BoxOptions.of(given), variables)
    tasks = _chosen(load_tasks(folder), names)[:most]
    checks = in_loop(_checked, tasks, boxes, variables, reward_key)
    save_checks(folder / CHECKED, checks)
    console = SafeConsole()
    _show(console, checks)
    # A task with steps is not a bad one: Harbor's Trial plays it.
    bad = [
        check.task for task, check in zip(tasks, checks, strict=True) if check.rung is None and not task.config.steps
    ]
    console.print(Text(f"{len(bad)} of {len(tasks)} tasks are bad" if bad else f"{len(tasks)} tasks: stored"))
    return BROKEN if bad else 0


async def _checked(
    tasks: Sequence[HarborTask], boxes: TaskBoxes, variables: Mapping[str, str], reward_key: str | None
) -> list[TaskCheck]:
    return await check_tasks(tasks, boxes, variables=variables, reward_key=reward_key)


def _chosen(tasks: list[HarborTask], names: Sequence[str] | None) -> list[HarborTask]:
    known = {task.name: task for task in tasks}
    for name in names or ():
        if name not in known:
            raise ConfigError.of("--task", name, f"one of {', '.join(known)}")
    return tasks if names is None else [task for task in tasks if task.name in names]


def _show(console: Console, checks: Sequence[TaskCheck]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("task", "rung", *RUNGS):
        table.add_column(title)
    for check in checks:
        cells = [_cell(check, rung) for rung in RUNGS]
        style = "bold red" if check.rung is None else "green"
        table.add_row(visible(check.task), Text(check.rung or "none", style), *cells)
    console.print(table)
    for check in checks:
        if check.note:
            console.print(Text(f"{visible(check.task)}: {visible(check.note)}"))


def _cell(check: TaskCheck, rung: str) -> str:
    """The rewards of oracle and no-op, e.g. ``1 / 0``; ``-`` without a verdict."""
    played = check.rewards.get(rung)
    if played is None:
        return ""
    shown = []
    for player in ("oracle", "noop"):
        rewards = played[player]
        shown.append("-" if isinstance(rewards, str) else ", ".join(f"{value:g}" for value in rewards.values()))
    return " / ".join(shown)
