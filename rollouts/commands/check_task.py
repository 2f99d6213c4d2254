"""``rollouts check-task``: run the tests of a recipe's tasks without a solution and with the reference.

A folder in the place of the recipe is one of Harbor tasks, see :mod:`rollouts.commands.check_harbor`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rollouts.commands.arguments import BROKEN, add_options, add_verb, all_options_of, in_loop, positive
from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.programs.task_check import TaskCheck, TaskReport, checks_of, reports
from rollouts.recipe.files import build, load_recipe
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.transcript import visible

__all__ = ["add", "show_reports"]

_OUTPUT_LINES = 12


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    does = "do the tests of a recipe's tasks tell a solution from none?"
    parser = add_verb(verbs, "check-task", _check_task, does, "check-task repositories")
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="recipe, or folder of Harbor tasks")
    parser.add_argument("--task", action="append", metavar="NAME", help="only this task; may be repeated")
    parser.add_argument("--tasks", type=positive, metavar="N", help="only the first N tasks")
    add_options(parser, "--data", "--set")


def _check_task(args: argparse.Namespace) -> int:
    if args.recipe.is_dir():
        from rollouts.commands.check_harbor import check_folder  # few use it

        return check_folder(args.recipe, all_options_of(args), args.task, args.tasks)
    recipe = build(load_recipe(args.recipe), Endpoint(model=str(DEMO_MODEL)), all_options_of(args))
    checks = _chosen(checks_of(recipe.config.generate_fn), args.task, args.tasks)
    return 0 if in_loop(show_reports, checks, SafeConsole()) else BROKEN


def _chosen(checks: Mapping[str, TaskCheck], names: list[str] | None, most: int | None) -> dict[str, TaskCheck]:
    for name in names or ():
        if name not in checks:
            raise ConfigError.of("--task", name, f"one of {', '.join(checks)}")
    return dict([(name, check) for name, check in checks.items() if names is None or name in names][:most])


async def show_reports(checks: Mapping[str, TaskCheck], console: Console) -> bool:
    """Print a line for each task as it is checked; return whether all are good."""
    bad = 0
    async for report in reports(checks):
        bad += not report.good
        console.print(_lines(report))
    console.print(Text(f"{bad} of {len(checks)} tasks are bad" if bad else f"{len(checks)} tasks: all good"))
    return not bad


def _lines(report: TaskReport) -> Text:
    if report.good:
        note = f" ({visible(report.note)})" if report.note else ""
        return Text(f"{visible(report.name)}: good{note}", "green")
    text = Text("\n".join(f"{visible(report.name)}: {visible(finding)}" for finding in report.findings), "bold red")
    for line in report.output.splitlines()[-_OUTPUT_LINES:]:
        text.append(f"\n    {visible(line)}", "default")
    return text
