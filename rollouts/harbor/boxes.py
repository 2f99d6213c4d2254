"""From the settings of a task to a kind of sandbox: image, network, resources, variables and user.

Invariant: a setting that the kind does not honour is a ``ConfigError`` that names it, unless the user named it in
``ignore``. This module knows no agent and no verdict.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from rollouts.base.validators import as_texts, check
from rollouts.errors import ConfigError
from rollouts.harbor.schema import EnvironmentConfig
from rollouts.harbor.tasks import HarborTask, resolved_env
from rollouts.sandboxes import Sandbox, SandboxLimits
from rollouts.sandboxes.image import ImageSandbox
from rollouts.sandboxes.images import build_image, load_image, named_image

__all__ = ["BoxOptions", "TaskBoxes", "Wanted", "sandbox_of"]

_MIB = 1 << 20
_OUTPUT = 16 * _MIB
_SPARE_MB = 128
"""Of a box beyond its processes and files, which count as memory: its ``/dev/shm``, and the kernel's."""
_IGNORABLE = ("cpus", "memory_mb", "storage_mb")


def _default_store() -> str:
    return os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")) + "/rollouts/images"


def _is_open(folder: str) -> bool:
    return os.path.isdir(folder) and os.stat(folder).st_mode & 0o555 == 0o555


@attrs.frozen
class BoxOptions:
    """The user's choices for the boxes of all tasks."""

    store: str = attrs.field(factory=_default_store)
    """The folder of unpacked images."""
    root: str | None = None
    """An image's folder that is used in the place of every task's image, whose Dockerfile is then not read."""
    layers: tuple[str, ...] = attrs.field(
        default=(),
        converter=as_texts,
        validator=check("folders that all users can read and enter", lambda value: all(map(_is_open, value))),
    )
    """Folders that lie over the image of every task, the topmost first, e.g. with an agent that is installed there. The
    root folder of a box has the rights of the topmost. The box of a separate verifier has none of them."""
    network: Literal["none", "task"] = attrs.field(
        default="none", validator=check('"none" or "task"', lambda value: value in ("none", "task"))
    )
    """``"none"``: no box has a network but our listener. ``"task"``: the box of a public task is in the network of this
    machine, its loopback interface too."""
    memory_mb: int = attrs.field(default=8192, validator=check("an integer > 0", lambda value: value > 0))
    """Of each process of a box; ``memory_mb`` of a task limits all of them together."""
    storage_mb: int = attrs.field(default=4096, validator=check("an integer > 0", lambda value: value > 0))
    """Of the files that a box writes, where the task does not say."""
    ignore: tuple[str, ...] = attrs.field(
        default=(),
        converter=as_texts,
        validator=check(f"some of {', '.join(_IGNORABLE)}", lambda value: set(value) <= set(_IGNORABLE)),
    )
    """Limits of tasks that are dropped; ``cpus`` and ``memory_mb`` need control groups that can be written."""

    def of_verifier(self) -> BoxOptions:
        """The options for the box of a separate verifier: no tool of the agent's layers judges it."""
        return attrs.evolve(self, layers=())

    @classmethod
    def names(cls) -> set[str]:
        """The names of the options."""
        return {field.name for field in attrs.fields(cls)}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> BoxOptions:
        """The options in a mapping, e.g. of Harbor's command line, whose numbers may be strings."""
        unknown = given.keys() - cls.names()
        if unknown:
            raise ConfigError.of("BoxOptions", sorted(unknown), f"some of {', '.join(sorted(cls.names()))}")
        numbers = {name: int(given[name]) for name in ("memory_mb", "storage_mb") if name in given}
        lists = {name: _words(given[name]) for name in ("ignore", "layers") if name in given}
        return cls(**{**given, **numbers, **lists})


def _words(value: Any) -> tuple[str, ...]:
    return tuple(word for word in value.split(",") if word) if isinstance(value, str) else tuple(value)


@attrs.frozen
class Wanted:
    """The settings of one box."""

    folder: Path
    """With the Dockerfile, if there is one."""
    docker_image: str | None
    workdir: str | None
    env: Mapping[str, str] = attrs.field(repr=False)
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    public: bool
    """Whether the task asks for a network."""
    user: str | None = None
    """Of the program and of commands that name none; by default the image's."""
    build_seconds: float = 600.0


async def sandbox_of(wanted: Wanted, options: BoxOptions, *, force_build: bool = False) -> ImageSandbox:
    """The kind of sandbox for a box; its image is built or unpacked if it is not in the store.

    Raises:
        ConfigError: a setting is not honoured, or the image cannot be built on this machine.
        SandboxError: the build failed.
    """
    memory = None if "memory_mb" in options.ignore else wanted.memory_mb
    storage = options.storage_mb if wanted.storage_mb is None or "storage_mb" in options.ignore else wanted.storage_mb
    has_dockerfile = (wanted.folder / "Dockerfile").is_file()
    if options.root is not None:
        image = load_image(options.root)
    elif wanted.docker_image is not None and not (force_build and has_dockerfile):
        image = await named_image(wanted.docker_image, options.store, seconds=wanted.build_seconds)
    else:
        image = await build_image(wanted.folder, options.store, seconds=wanted.build_seconds)
    if options.layers:
        image = attrs.evolve(image, roots=(*map(os.path.abspath, options.layers), *image.roots))
    env: Any = dict(wanted.env)  # attrs' type of the converter takes no mapping
    return ImageSandbox(
        image,
        workdir=wanted.workdir,
        env=env,
        user=wanted.user,
        network="host" if wanted.public and options.network == "task" else "none",
        keep_processes=True,
        cpus=None if "cpus" in options.ignore else wanted.cpus,
        memory_bytes=None if memory is None else (memory + storage + _SPARE_MB) * _MIB,
        limits=SandboxLimits(
            memory_bytes=options.memory_mb * _MIB,
            disk_bytes=storage * _MIB,
            file_bytes=storage * _MIB,
            output_bytes=_OUTPUT,
        ),
    )


@attrs.frozen
class TaskBoxes:
    """The kinds of sandbox of tasks; a :data:`~rollouts.harbor.workspace.KindOf`."""

    options: BoxOptions = attrs.field(factory=BoxOptions)
    variables: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """Values that ``${VAR}`` of a task may read."""

    async def __call__(self, task: HarborTask, separate: bool) -> Sandbox:
        """The kind of a task's agent, or of its separate verifier."""
        place = task.verifier_place() if separate else None
        environment: EnvironmentConfig = task.config.environment if place is None else place.environment
        user = task.config.agent.user if place is None else None
        return await sandbox_of(
            Wanted(
                folder=task.environment_folder if place is None else place.folder,
                docker_image=environment.docker_image,
                workdir=environment.workdir,
                env=resolved_env(environment.env, self.variables, f"{task.name}: environment.env"),
                cpus=environment.cpus,
                memory_mb=environment.memory_mb,
                storage_mb=environment.storage_mb,
                public=environment.network_mode == "public",
                user=None if user is None else str(user),
                build_seconds=environment.build_timeout_sec,
            ),
            self.options if place is None else self.options.of_verifier(),
        )
