"""The loader of Harbor's task folders: a folder with ``task.toml``, ``instruction.md`` and ``tests/`` as a value.

Invariant: a task that is loaded is complete and understood: every file that its play needs is there, inside its folder,
and every field of its ``task.toml`` is honoured (:mod:`rollouts.harbor.schema`). Otherwise the load fails before any
work, with all errors of all tasks in one message.

It needs neither Harbor nor Python 3.12, and knows no sandbox and no agent.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.harbor.ignore import IGNORE_FILE, excluded
from rollouts.harbor.schema import EnvironmentConfig, StepConfig, TaskConfig, VerifierConfig, read_config

__all__ = [
    "HarborTask",
    "TaskFile",
    "VerifierPlace",
    "load_task",
    "load_tasks",
    "prompts_of",
    "resolved_env",
    "task_of",
]

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


@attrs.frozen
class TaskFile:
    """One file of a task, to be written into a box."""

    path: str
    """Relative to the folder that it is part of."""
    data: bytes = attrs.field(repr=False)
    mode: int


@attrs.frozen
class VerifierPlace:
    """The box of a verifier that does not run in the agent's box."""

    environment: EnvironmentConfig
    folder: Path
    """The folder of its build file, if it has one."""
    bundled_tests: bool
    """Whether its image contains ``/tests``, so that no tests are uploaded."""


@attrs.frozen
class HarborTask:
    """One task folder."""

    folder: Path
    name: str
    config: TaskConfig = attrs.field(repr=False)
    instruction: str = attrs.field(repr=False)
    """Without canary lines; empty for a task with steps."""
    step_instructions: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """By the name of the step."""

    @property
    def environment_folder(self) -> Path:
        """The folder of the build file."""
        return self.folder / "environment"

    @property
    def has_dockerfile(self) -> bool:
        """Whether the image is built from a Dockerfile."""
        return (self.environment_folder / "Dockerfile").is_file()

    def tests(self) -> tuple[TaskFile, ...]:
        """The files of ``tests/``, for ``/tests``."""
        return self._tree("tests")

    def solution(self) -> tuple[TaskFile, ...]:
        """The files of ``solution/``, for ``/solution``; none without a solution."""
        return self._tree("solution")

    def loose_files(self) -> tuple[TaskFile, ...]:
        """The files of ``environment/`` for the working folder: those of a task with an image and no build file."""
        if self.has_dockerfile or self.config.environment.docker_image is None:
            return ()
        return self._tree("environment", ignore=False)

    def verifier_place(self) -> VerifierPlace | None:
        """The separate box of the verifier that the task asks for; ``None`` for the agent's box."""
        verifier = self.config.verifier
        if not verifier.separate:
            return None
        own = verifier.environment
        config = own or self.config.environment
        if own is not None and own.docker_image is not None:
            return VerifierPlace(own, self.folder / "tests", bundled_tests=True)
        if (self.folder / "tests" / "Dockerfile").is_file():
            return VerifierPlace(attrs.evolve(config, docker_image=None), self.folder / "tests", bundled_tests=True)
        image = self.config.environment.docker_image
        return VerifierPlace(attrs.evolve(config, docker_image=image), self.environment_folder, bundled_tests=False)

    def _tree(self, name: str, *, ignore: bool = True) -> tuple[TaskFile, ...]:
        root = self.folder / name
        rules: dict[PurePosixPath, list[str]] = {}

        def rules_of(folder: PurePosixPath) -> list[str]:
            if folder not in rules:
                file = root / folder / IGNORE_FILE
                rules[folder] = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
            return rules[folder]

        found = []
        for path in _inside(root, self.folder):
            relative = PurePosixPath(path.relative_to(root).as_posix())
            if not (ignore and excluded(relative, rules_of)):
                found.append(TaskFile(str(relative), path.read_bytes(), path.stat().st_mode & 0o777))
        return tuple(found)


def load_tasks(folder: str | Path) -> list[HarborTask]:
    """Load a task folder, or all task folders in a folder, by name.

    A folder without ``task.toml`` is not a task, and is not searched, as in Harbor.

    Raises:
        ConfigError: there is no task, a task is incomplete, or a field is unknown or not honoured; with all errors.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError.of("folder", str(folder), "a folder that exists")
    folders = [root] if (root / "task.toml").is_file() else sorted(path.parent for path in root.glob("*/task.toml"))
    if not folders:
        raise ConfigError.of("folder", str(folder), "a folder with task.toml, or with folders that have one")
    tasks: dict[str, HarborTask] = {}
    errors = []
    for path in folders:
        try:
            task = load_task(path)
            if task.name in tasks:
                other = tasks[task.name].folder.name
                raise ConfigError.of(f"{path.name}: task.name", task.name, f"a name that {other} has not")
            tasks[task.name] = task
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    return list(tasks.values())


def load_task(folder: str | Path) -> HarborTask:
    """Load one task folder.

    Raises:
        ConfigError: as :func:`load_tasks`.
    """
    path = Path(folder).resolve()
    try:
        return _loaded(path)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: {error}") from error


def _loaded(folder: Path) -> HarborTask:
    file = folder / "task.toml"
    if not file.is_file():
        raise ConfigError.of("folder", str(folder), "a folder with task.toml")
    try:
        data = tomllib.loads(_text_of(file))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"task.toml: {error}") from None
    config = read_config(data)
    name = config.task.name if config.task is not None else folder.name
    task = HarborTask(folder, name, config, "")
    _check_environment(task)
    _check_network(config)
    if config.steps:
        return attrs.evolve(task, step_instructions={step.name: _check_step(task, step) for step in config.steps})
    if config.multi_step_reward_strategy is not None:
        raise ConfigError.of("multi_step_reward_strategy", config.multi_step_reward_strategy, "none without steps")
    place = task.verifier_place()
    if place is None or not place.bundled_tests:
        _need(task, "tests/test.sh")
        if not any(test.path == "test.sh" for test in task.tests()):
            raise ConfigError.of("tests/test.sh", IGNORE_FILE, "a file that is not ignored")
    for part in ("tests", "solution"):
        _inside(folder / part, folder)
    return attrs.evolve(task, instruction=_instruction(task, "instruction.md"))


def _check_environment(task: HarborTask) -> None:
    folder, environment = task.environment_folder, task.config.environment
    for where in (folder, task.folder / "tests"):
        for name in _COMPOSE:
            if (where / name).is_file():
                found = f"{where.name}/{name}"
                raise ConfigError.of(found, "a compose file", "a Dockerfile or an image: one box has one service")
    if environment.docker_image is None and not task.has_dockerfile:
        raise ConfigError.of("environment/Dockerfile", None, "a file, or [environment].docker_image")


def _check_network(config: TaskConfig) -> None:
    """Raise if a phase has another network than its box: boxes do not change theirs."""
    for where, verifier, agent in (
        ("", config.verifier, config.agent),
        *((f"steps.{step.name}.", step.verifier, step.agent) for step in config.steps or ()),
    ):
        box = config.environment.network_mode
        if agent.network_mode not in (None, box):
            raise ConfigError.of(f"{where}agent.network_mode", agent.network_mode, f"{box}, as the environment has it")
        graded_in = verifier.environment or config.environment
        if verifier.network_mode not in (None, graded_in.network_mode):
            raise ConfigError.of(f"{where}verifier.network_mode", verifier.network_mode, graded_in.network_mode)


def _check_step(task: HarborTask, step: StepConfig) -> str:
    folder = f"steps/{step.name}"
    _inside(task.folder / folder, task.folder)
    has_tests = any((task.folder / path).is_file() for path in (f"{folder}/tests/test.sh", "tests/test.sh"))
    if not has_tests and not _bundled(task, step.verifier):
        raise ConfigError.of(f"{folder}/tests/test.sh", None, "a file, or tests/test.sh of the task")
    return _instruction(task, f"{folder}/instruction.md")


def _bundled(task: HarborTask, verifier: VerifierConfig) -> bool:
    place = verifier.environment or task.config.verifier.environment
    return place is not None and place.docker_image is not None


def _need(task: HarborTask, path: str) -> Path:
    file = task.folder / path
    if not file.is_file():
        raise ConfigError.of(path, None, "a file")
    _check_inside(file, task.folder)
    return file


def _instruction(task: HarborTask, path: str) -> str:
    """The instruction without leading canary lines, which mark a file as no training data and are not for the agent."""
    lines = _text_of(_need(task, path)).split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    text = "\n".join(lines[start:])
    if not text.strip():
        raise ConfigError.of(path, text, "a string that is not empty")
    return text


def _inside(root: Path, folder: Path) -> list[Path]:
    """The files below ``root``, sorted.

    Raises:
        ConfigError: one of them is a link that leads out of the task.
    """
    found = []
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        _check_inside(path, folder)
        if path.is_file():
            found.append(path)
    return found


def _check_inside(path: Path, folder: Path) -> None:
    place = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for links that name each other
    if not place.is_relative_to(folder.resolve()):
        raise ConfigError.of(path.relative_to(folder).as_posix(), str(place), "a file inside the task")


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.name}: expected text in UTF-8 ({error})") from None


# -- prompts ----------------------------------------------------------------------------------------------------------


def prompts_of(tasks: Sequence[HarborTask]) -> list[Prompt]:
    """One prompt a task: its instruction, and in ``metadata["harbor"]`` its name and its folder.

    The prompt of a task with steps is the instruction of its first step; Harbor's Trial gives the others to its agent.
    """
    prompts = []
    for task in tasks:
        text = task.instruction or next(iter(task.step_instructions.values()))
        prompts.append(Prompt(text, metadata={"harbor": {"task": task.name, "path": str(task.folder)}}))
    return prompts


def task_of(metadata: Mapping[str, Any], tasks: Mapping[str, HarborTask]) -> HarborTask:
    """The task that the metadata of a prompt or of a sample names."""
    found = metadata.get("harbor")
    name = found.get("task") if isinstance(found, Mapping) else None
    task = tasks.get(name) if isinstance(name, str) else None
    if task is None:
        raise ConfigError.of('metadata["harbor"]["task"]', name, f"one of {', '.join(sorted(tasks))}")
    return task


def resolved_env(env: Mapping[str, str], variables: Mapping[str, str], where: str) -> dict[str, str]:
    """Variables of a task with their templates ``${VAR}`` and ``${VAR:-default}`` resolved.

    Args:
        variables: the values that templates may read. Harbor 0.25.0 reads all of the host's (utils/env.py:
            resolve_env_vars), which would put the user's keys into the box of a policy.

    Raises:
        ConfigError: a template names another variable, and has no default.
    """
    resolved = {}
    for name, value in env.items():
        template = _TEMPLATE.fullmatch(value)
        if template is None:
            resolved[name] = value
        elif template[1] in variables:
            resolved[name] = variables[template[1]]
        elif template[2] is not None:
            resolved[name] = template[2]
        else:
            raise ConfigError.of(f"{where}.{name}", value, f"a value of {template[1]} in variables")
    return resolved
