"""The check of tasks: oracle and no-op on each rung, and the strictest rung on which both get Harbor's rewards.

Invariant: a rung serves a task if the task's own solution and an agent that does nothing get there the rewards that
they get on Harbor's rung (``keep``, or ``separate`` where the task says so), and the solution gets more. The result is
stored with a digest of the task's files, and is not used for other files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import anyio
import attrs

from rollouts.errors import ConfigError, RolloutsError
from rollouts.harbor.grading import fill, grade, healthy, run_solution
from rollouts.harbor.tasks import HarborTask, resolved_env
from rollouts.harbor.verdict import RUNGS, Rung
from rollouts.harbor.workspace import KindOf, check_playable, fresh_box, rungs_of, verifier_env
from rollouts.sandboxes import SandboxError

__all__ = ["CHECKED", "TaskCheck", "check_tasks", "digest_of", "load_checks", "save_checks", "stored_rungs"]

CHECKED = "rollouts-check.json"
"""The name of the file of results, in the folder of the tasks."""
_LONGEST_SOLUTION = 3600.0

Player: TypeAlias = Literal["oracle", "noop"]
Rewards: TypeAlias = Mapping[str, float] | str
"""The rewards of one play, or why there are none."""


@attrs.frozen
class TaskCheck:
    """The result of one task."""

    task: str
    digest: str
    rewards: Mapping[str, Mapping[str, Rewards]]
    """By rung and player (``oracle``, ``noop``)."""
    rung: Rung | None
    """The strictest rung that serves."""
    note: str = ""
    """Why none serves."""


async def check_tasks(
    tasks: Sequence[HarborTask],
    kind_of: KindOf,
    *,
    variables: Mapping[str, str] | None = None,
    reward_key: str | None = None,
    at_once: int = 2,
) -> list[TaskCheck]:
    """Play each task with its solution and with nothing, on each rung that it may be graded on.

    Args:
        kind_of: the kind of sandbox for a task.
        variables: values that ``${VAR}`` of a task may read.
        reward_key: as for :class:`~rollouts.harbor.workspace.HarborWorkspace`.
        at_once: boxes that are open at a time, apart from those of verifiers.

    Returns:
        One result for each task, in order. A task that fails has no rung, and a note.
    """
    limit, results = anyio.CapacityLimiter(at_once), dict[str, TaskCheck]()

    async def check(task: HarborTask) -> None:
        async with limit:
            results[task.name] = await _checked(task, kind_of, variables or {}, reward_key)

    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(check, task)
    return [results[task.name] for task in tasks]


async def _checked(
    task: HarborTask, kind_of: KindOf, variables: Mapping[str, str], reward_key: str | None
) -> TaskCheck:
    digest = digest_of(task)
    try:
        check_playable(task)
    except ConfigError as error:
        return TaskCheck(task.name, digest, {}, None, str(error))
    rungs = rungs_of(task)
    found: dict[str, dict[str, Rewards]] = {}
    for rung in reversed(rungs):  # Harbor's first
        found[rung] = {
            player: await _played(task, player, rung, kind_of, variables, reward_key) for player in get_args(Player)
        }
    base = found[rungs[-1]]
    note = _fault(base)
    serves = None if note else next(each for each in rungs if found[each] == base)
    return TaskCheck(task.name, digest, found, serves, note)


def _fault(base: Mapping[str, Rewards]) -> str:
    """Why a task trains nothing; empty for a sound task."""
    oracle, noop = base["oracle"], base["noop"]
    if isinstance(oracle, str):
        return f"the solution gets no verdict: {oracle}"
    if isinstance(noop, str):
        return f"an agent that does nothing gets no verdict: {noop}"
    if not any(oracle[key] > noop.get(key, float("-inf")) for key in oracle):
        return f"the solution gets {dict(oracle)}, and an agent that does nothing {dict(noop)}"
    return ""


async def _played(
    task: HarborTask,
    player: Player,
    rung: Rung,
    kind_of: KindOf,
    variables: Mapping[str, str],
    reward_key: str | None,
) -> Rewards:
    try:
        async with fresh_box(task, kind_of, "keep") as box:
            await fill(task, box)
            await healthy(box, task.config.environment.healthcheck)
            if player == "oracle":
                env = resolved_env(task.config.solution.env, variables, f"{task.name}: solution.env")
                seconds = task.config.agent.timeout_sec or _LONGEST_SOLUTION
                await run_solution(task, box, env, seconds=seconds)
            verdict = await grade(
                task,
                box,
                rung,
                lambda: fresh_box(task, kind_of, rung),
                env=verifier_env(task, variables),
                reward_key=reward_key,
            )
    except (RolloutsError, SandboxError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return verdict.rewards


# -- stored results ---------------------------------------------------------------------------------------------------


def digest_of(task: HarborTask) -> str:
    """The SHA-256 of the files of a task."""
    whole = hashlib.sha256()
    for path in sorted(task.folder.rglob("*")):
        if path.is_file() and not path.name.endswith((CHECKED, f"{CHECKED}.new")):
            mode = path.stat().st_mode & 0o777
            whole.update(f"{path.relative_to(task.folder).as_posix()}\0{mode:o}\0{path.stat().st_size}\0".encode())
            whole.update(path.read_bytes())
    return whole.hexdigest()


def save_checks(path: Path, checks: Sequence[TaskCheck]) -> None:
    """Store results; those of other tasks in the file stay."""
    rows = load_checks(path) if path.exists() else {}
    rows |= {check.task: check for check in checks}
    tasks = {name: attrs.asdict(row) for name, row in sorted(rows.items())}
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps({"format": 1, "tasks": tasks}, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def load_checks(path: Path) -> dict[str, TaskCheck]:
    """The stored results by task.

    Raises:
        ConfigError: the file is missing, or not one of :func:`save_checks`.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != 1:
            raise ConfigError.of(f"{path}: format", data["format"], "1")
        rows = {name: TaskCheck(**row) for name, row in data["tasks"].items()}
        if any(row.rung not in (*RUNGS, None) for row in rows.values()):
            raise ConfigError.of(str(path), "an unknown rung", f"one of {', '.join(RUNGS)}")
    except FileNotFoundError:
        raise ConfigError.of(str(path), None, "results of rollouts check-task") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: got {type(error).__name__}: {error}; expected results of check-task") from error
    return rows


def stored_rungs(tasks: Sequence[HarborTask], path: Path) -> dict[str, Rung]:
    """The strictest rung that serves each task, as stored.

    Raises:
        ConfigError: a task was not checked with its present files, or no rung serves it; with all such tasks.
    """
    rows, rungs, errors = load_checks(path), dict[str, Rung](), []
    for task in tasks:
        row = rows.get(task.name)
        if row is None or row.digest != digest_of(task):
            found = "not checked" if row is None else "checked with other files"
            errors.append(f"{task.name}: {found}; expected a result: rollouts check-task {path.parent}")
        elif row.rung is None:
            errors.append(f"{task.name}: no rung serves: {row.note}; expected a sound task, or another folder")
        else:
            rungs[task.name] = row.rung
    if errors:
        raise ConfigError("\n".join(errors))
    return rungs
