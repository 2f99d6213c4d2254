"""Check of tasks before a run: their tests fail without a solution, and pass with the reference solution.

Invariant: a task is good only if its own tests said so in fresh sandboxes. A sandbox that fails is a finding of its
task, and not of the others.

A kind of task is checked by its workspace, which has a method ``checks``; this module knows one kind.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import attrs

from rollouts.concurrency.boundary import boundary
from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.programs.launchers.repository_task import InImage, RepositoryTask, Verdict, score
from rollouts.sandboxes import Sandbox

__all__ = ["CheckedWorkspace", "TaskCheck", "TaskReport", "check_repository_task", "checks_of", "reports"]

TaskCheck: TypeAlias = "Callable[[], Awaitable[TaskReport]]"


@attrs.frozen
class TaskReport:
    """The findings on one task."""

    name: str
    findings: tuple[str, ...] = ()
    """Its faults, a sentence each; empty if it is good."""
    output: str = attrs.field(default="", repr=False)
    """The end of what the last tests wrote."""
    note: str = ""
    """The part that was not checked."""

    @property
    def good(self) -> bool:
        return not self.findings


@runtime_checkable
class CheckedWorkspace(Protocol):
    """A workspace whose tasks can be checked."""

    def checks(self, sandbox: Sandbox) -> Mapping[str, TaskCheck]:
        """The check of each task by its name."""
        ...


async def check_repository_task(task: RepositoryTask, sandbox: Sandbox) -> TaskReport:
    """Run the tests of a task at its base and with its reference, each in a fresh sandbox.

    Raises:
        SandboxError: a sandbox failed.
    """
    base = await score(task, sandbox, b"")
    passed = [name for name in task.fail_to_pass if base.results.get(name)]
    failed = [name for name in task.pass_to_pass if not base.results.get(name)]
    findings = [f"passes at the base, where fail_to_pass fails: {_listed(passed)}"] if passed else []
    findings += [f"fails at the base, where pass_to_pass passes: {_listed(failed)}"] if failed else []
    if task.reference is None:
        return TaskReport(task.name, tuple(findings), base.output, note="no reference solution: only its base")
    solved = await score(task, sandbox, task.reference)
    if not solved.resolved:
        findings.append(f"{solved.outcome} with the reference solution{_failing(solved)}{_hint(task, base, solved)}")
    return TaskReport(task.name, tuple(findings), solved.output)


def _failing(verdict: Verdict) -> str:
    names = [name for name, passed in verdict.results.items() if not passed]
    return f": {_listed(names)}" if names else ""


def _hint(task: RepositoryTask, base: Verdict, solved: Verdict) -> str:
    """The likely cause, where the reference changes no result of a repository of the image."""
    if not isinstance(task.source, InImage) or task.source.in_place or solved.results != base.results:
        return ""
    path = task.source.path
    return (
        f". It changes no result: do the tests import {path}? InImage({path!r}, in_place=True) makes it the workspace"
    )


def _listed(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def checks_of(generate_fn: Any) -> Mapping[str, TaskCheck]:
    """The checks of a recipe's tasks, from its generate function.

    Raises:
        ConfigError: its tasks have no checks.
    """
    bound = generate_fn.keywords if isinstance(generate_fn, functools.partial) else {}
    workspace, sandbox = bound.get("workspace"), bound.get("sandbox")
    sandbox = getattr(sandbox, "__wrapped__", sandbox)  # a check opens its own, none that was opened ahead
    if not isinstance(workspace, CheckedWorkspace) or sandbox is None:
        raise ConfigError.of("recipe", type(workspace).__name__, "a workspace whose tasks have checks: repositories")
    return workspace.checks(sandbox)


async def reports(checks: Mapping[str, TaskCheck]) -> AsyncIterator[TaskReport]:
    """The reports, one after the other."""
    for name, check in checks.items():
        try:
            with boundary(EnvironmentFailure, f"the check of task {name!r}", kind="environment_step"):
                report = await check()
        except (EnvironmentFailure, ConfigError) as error:
            report = TaskReport(name, (str(error),))
        yield report
