"""The files that fill a program's workspace before it starts, and the results that are taken out when it has ended.

The results become metadata of the sample, which a reward function reads. This module knows no model and no sample.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from rollouts.base.validators import as_texts, integer
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.programs.launchers.repository_task import Prepared, RepositoryTask, prepare, take_diff
from rollouts.programs.task_check import TaskReport, check_repository_task
from rollouts.sandboxes import RunningSandbox, Sandbox, SandboxError

__all__ = ["FilesWorkspace", "RepositoryWorkspace", "Workspace", "diff_of"]

_MOST_BYTES = 1 << 20


class Workspace(Protocol):
    """Fills and reads the workspaces of programs; one object serves all rollouts."""

    async def fill(self, prompt: Prompt, place: RunningSandbox) -> Any:
        """Prepare an empty workspace for a task; the returned value is passed to :meth:`take`."""
        ...

    async def take(self, prompt: Prompt, place: RunningSandbox, filled: Any) -> Mapping[str, Any]:
        """Return metadata of the sample, as JSON values, once the program has ended or was killed.

        A number under ``"reward"`` is the reward of the rollout; another value there fails it.
        """
        ...


@attrs.frozen
class FilesWorkspace:
    """A workspace that is empty, or has the files in ``metadata["files"]`` of the prompt, as strings by path."""

    names: Sequence[str] = attrs.field(converter=as_texts)
    """The files to take: ``metadata["files"]`` of the sample has their content by path, ``None`` for a missing file."""
    most_bytes: int = attrs.field(default=_MOST_BYTES, validator=integer(1))
    """A larger file counts as missing."""

    async def fill(self, prompt: Prompt, place: RunningSandbox) -> None:
        """Write the files of the prompt."""
        files = prompt.metadata.get("files", {})
        if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
            raise ConfigError.of('Prompt.metadata["files"]', files, "strings by path")
        for path, text in files.items():
            await place.write(path, text.encode())

    async def take(self, prompt: Prompt, place: RunningSandbox, filled: None) -> dict[str, Any]:
        """Read the files."""
        return {"files": {name: await self._text(place, name) for name in self.names}}

    async def _text(self, place: RunningSandbox, name: str) -> str | None:
        try:
            data = await place.read(name)
        except SandboxError:  # larger than the sandbox reads: the program's doing
            return None
        return None if data is None or len(data) > self.most_bytes else data.decode(errors="replace")


@attrs.frozen
class RepositoryWorkspace:
    """A repository, and the program's change of it as a diff; :func:`diff_of` finds it in the sample's metadata."""

    tasks: Mapping[str, RepositoryTask] = attrs.field(repr=lambda tasks: f"{len(tasks)} tasks")
    """By name, which is ``metadata["task"]`` of the prompt."""
    most_bytes: int = attrs.field(default=_MOST_BYTES, validator=integer(1))
    """A larger diff counts as not taken."""

    def task(self, metadata: Mapping[str, Any]) -> RepositoryTask:
        """The task that the metadata of a prompt or a sample names."""
        name = metadata.get("task")
        task = self.tasks.get(name) if isinstance(name, str) else None
        if task is None:
            raise ConfigError.of('metadata["task"]', name, f"one of {', '.join(sorted(self.tasks))}")
        return task

    def checks(self, sandbox: Sandbox) -> dict[str, Callable[[], Awaitable[TaskReport]]]:
        """The check of each task by its name; see :func:`~rollouts.programs.task_check.check_repository_task`."""
        return {name: functools.partial(check_repository_task, task, sandbox) for name, task in self.tasks.items()}

    async def fill(self, prompt: Prompt, place: RunningSandbox) -> Prepared:
        """Prepare the repository of the prompt's task."""
        return await prepare(self.task(prompt.metadata), place)

    async def take(self, prompt: Prompt, place: RunningSandbox, filled: Prepared) -> dict[str, Any]:
        """Take the diff."""
        diff = await take_diff(filled, place)
        if isinstance(diff, bytes) and len(diff) > self.most_bytes:
            diff = f"the diff has {len(diff):,} bytes; expected at most {self.most_bytes:,}"
        if isinstance(diff, str):
            return {"diff_not_taken": diff}
        try:
            return {"diff": diff.decode()}
        except UnicodeDecodeError:
            return {"diff_base64": base64.b64encode(diff).decode()}


def diff_of(metadata: Mapping[str, Any]) -> bytes | str:
    """The diff that :meth:`RepositoryWorkspace.take` returned: bytes, or text that says why it could not be taken."""
    if "diff" in metadata:
        return str(metadata["diff"]).encode()
    if "diff_base64" in metadata:
        return base64.b64decode(metadata["diff_base64"])
    return str(metadata.get("diff_not_taken", "the program's sandbox gave none"))
