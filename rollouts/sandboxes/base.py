"""The protocol of sandboxes: one opens for a rollout, runs its program, and is closed in any case.

Invariant: the outcome of a program is an :class:`Exit`, or a missing file; an exception of a sandbox is about the
sandbox or its arguments. After ``kill_all`` no process of the sandbox runs; after ``close`` nothing is left of it.

There are two ways of life. By default one command runs at a time, and when ``run`` or ``exec`` has returned or is
cancelled, every process of the sandbox is gone. A kind with ``keep_processes=True`` runs several commands at once, and
what they leave running lives on in the next command, until ``kill_all``.

This module knows no program, no model server and no task.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, get_args

import anyio
import attrs

from rollouts.base.validators import check, is_int
from rollouts.errors import ConfigError
from rollouts.sandboxes.containment import Containment

__all__ = [
    "BOOLEAN",
    "FIRST_PROCESS",
    "GATEWAY_PORT",
    "HOME_ENVIRONMENT",
    "NON_EMPTY",
    "Ability",
    "Command",
    "Exit",
    "RunningSandbox",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "Tail",
    "check_size",
    "inner_path",
    "log_close_failure",
    "opened",
    "require_abilities",
]

Ability: TypeAlias = Literal["keep_processes", "users"]
"""Abilities of a kind beyond the protocol's minimum: run several commands at once and keep their processes; run a
command as another user of the sandbox."""

_MIB = 1 << 20
GATEWAY_PORT = 8080
"""The port of the listener in the sandbox's network."""
HOME_ENVIRONMENT = {"LANG": "C.UTF-8", "TZ": "UTC", "USER": "agent", "LOGNAME": "agent"}
"""Variables that every sandbox sets, in addition to ``PATH``, ``HOME`` and ``TMPDIR``."""
FIRST_PROCESS = ("sh", "-c", "while :; do sleep 3600 & wait; done")
"""Process 1 of a container: it reaps, and outlives ``kill -1``."""
_CLOSE_SECONDS = 30.0
_LOG = logging.getLogger(__name__)

_COUNT = check("an integer > 0", lambda value: is_int(value, 1))
BOOLEAN = check("True or False", lambda value: isinstance(value, bool))
NON_EMPTY = check("a non-empty string", lambda value: isinstance(value, str) and bool(value))


class SandboxError(RuntimeError):
    """The sandbox itself failed; failures of the program are answers."""


@attrs.frozen
class SandboxLimits:
    """Resource limits of one sandbox. :meth:`Sandbox.containment` says which a kind enforces."""

    memory_bytes: int = attrs.field(default=8192 * _MIB, validator=_COUNT)
    """Private writable memory: of each process, or of all together in a container."""
    processes: int = attrs.field(default=512, validator=_COUNT)
    """Concurrent processes and threads."""
    file_bytes: int = attrs.field(default=256 * _MIB, validator=_COUNT)
    """Size of one file, also where it is read or written from outside."""
    disk_bytes: int = attrs.field(default=1024 * _MIB, validator=_COUNT)
    """Size of the workspace, of the home and of ``/tmp``, each."""
    output_bytes: int = attrs.field(default=64 * 1024, validator=_COUNT)
    """The last bytes of standard output and of standard error, each, that are kept."""


def _is_argument(value: Any) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


@attrs.frozen
class Command:
    """One command: its arguments are what an operating system takes."""

    argv: Sequence[str]
    env: Mapping[str, str]
    seconds: float
    cwd: str
    """A folder inside."""
    stdin: bytes = b""
    stop: anyio.Event | None = None
    """Kills the command when it is set."""
    user: str | None = None
    """A user of the sandbox, as a name, a number or ``user:group``; by default that of the kind."""

    def __attrs_post_init__(self) -> None:
        argv = self.argv
        if isinstance(argv, str | bytes) or not argv or not all(map(_is_argument, argv)) or not argv[0]:
            raise ConfigError.of("argv", argv, "a list of strings without null characters, the first not empty")
        for name, value in self.env.items():
            if not _is_argument(name) or not _is_argument(value) or not name or "=" in name:
                raise ConfigError.of("env", {name: value}, "names and values that are strings, a name without '='")
        seconds = self.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ConfigError.of("seconds", seconds, "a number > 0")
        if self.user is not None and (not _is_argument(self.user) or not self.user):
            raise ConfigError.of("user", self.user, "a user of the sandbox, or None")


@attrs.frozen
class Exit:
    """How one command ended."""

    code: int
    """Its exit code, the negated number of the signal that killed it, or 127 if it could not be started."""
    stdout: str
    """The end of its output, as UTF-8; invalid bytes are replaced."""
    stderr: str
    seconds: float
    """Wall time."""
    timed_out: bool = False
    """It was killed at its deadline."""
    truncated: bool = False
    """It wrote more than ``output_bytes``; the beginning is lost."""


class RunningSandbox(Protocol):
    """An open sandbox.

    A path is relative to the workspace, absolute inside the sandbox, or begins with ``~/`` for the home folder.
    """

    @property
    def workspace(self) -> str:
        """The program's folder, as the program sees it."""
        ...

    @property
    def home(self) -> str:
        """The program's home folder, as the program sees it; empty at first."""
        ...

    @property
    def listener(self) -> socket.socket | None:
        """A listening socket inside the sandbox's separate network, for the server that the program may reach.

        It is closed with the sandbox. ``None`` if the program is in a network that reaches our own ports.
        """
        ...

    def url_inside(self, port: int | None = None) -> str:
        """The address at which the program reaches a server of ours.

        Args:
            port: the server's port on this machine; with a ``listener`` it is not needed.
        """
        ...

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        seconds: float,
        stop: anyio.Event | None = None,
    ) -> Exit:
        """Run a program in the workspace, without standard input, to its end or its deadline.

        Args:
            stop: the program is killed when this is set, and its output so far is kept.
        """
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        seconds: float = 60.0,
        stdin: bytes = b"",
        cwd: str | None = None,
        user: str | None = None,
    ) -> Exit:
        """Run a command of set-up or scoring.

        Args:
            argv: the command and its arguments.
            env: further variables, which replace those of the sandbox.
            seconds: its deadline, at which it is killed.
            stdin: its standard input.
            cwd: a folder inside; by default the workspace.
            user: a user of the sandbox, as a name, a number or ``user:group``; by default that of the program.

        Raises:
            ConfigError: an argument is invalid, or ``user`` is given to a kind without the ability ``users``.
        """
        ...

    async def kill_all(self) -> None:
        """Kill every process of the sandbox, and return when they are gone. A command under way ends as killed.

        Raises:
            SandboxError: a process cannot be found or killed.
        """
        ...

    async def pack(self, path: str, archive: str | os.PathLike[str]) -> bool:
        """Write a file or folder of the sandbox to a tar archive of this machine, without programs of the sandbox.

        The member is named like the last part of ``path``, or ``.`` for ``/``. Links are stored as links.

        Returns:
            False if nothing is there; then no archive is written.

        Raises:
            SandboxError: it is larger than ``disk_bytes``, or cannot be read.
        """
        ...

    async def unpack(self, archive: str | os.PathLike[str], folder: str) -> None:
        """Extract a tar archive of this machine below a folder, without programs of the sandbox.

        The folder is made where it is missing. Owners are those of the archive, where the kind may set them. A member
        that would be written outside of the folder is refused.

        Raises:
            SandboxError: it cannot be extracted, or has more than ``disk_bytes``.
        """
        ...

    async def read(self, path: str) -> bytes | None:
        """Read a file; ``None`` if it is missing, not a regular file, or may not be read.

        Raises:
            SandboxError: it is larger than ``file_bytes``.
        """
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file of the program's user, and the folders above it.

        Raises:
            SandboxError: it cannot be written, or is larger than ``file_bytes``.
        """
        ...

    async def close(self) -> None:
        """Kill every process and delete every file. May be called twice."""
        ...


class Sandbox(Protocol):
    """A kind of sandbox with its settings; opened once for each rollout."""

    @property
    def limits(self) -> SandboxLimits:
        """Its resource limits."""
        ...

    @property
    def abilities(self) -> frozenset[Ability]:
        """Its abilities beyond the protocol's minimum; see :func:`require_abilities`."""
        ...

    def containment(self) -> Containment:
        """The limits that this kind enforces on a program, and the limits that it does not."""
        ...

    async def open(self) -> RunningSandbox:
        """Open a sandbox with an empty workspace.

        Raises:
            SandboxError: this machine cannot open one.
        """
        ...


def require_abilities(sandbox: Sandbox, *names: Ability) -> None:
    """Refuse a kind that lacks an ability, before work starts.

    Raises:
        ConfigError: the kind lacks one of them, by name.
    """
    for name in names:
        if name not in get_args(Ability):
            raise ConfigError.of("require_abilities", name, f"some of {', '.join(get_args(Ability))}")
    lacking = [name for name in names if name not in sandbox.abilities]
    if lacking:
        has = ", ".join(sorted(sandbox.abilities)) or "none"
        raise ConfigError.of("sandbox", type(sandbox).__name__, f"a kind with {', '.join(lacking)}; this one has {has}")


@contextlib.asynccontextmanager
async def opened(
    sandbox: Sandbox, on_close_failure: Callable[[Exception], None] | None = None
) -> AsyncIterator[RunningSandbox]:
    """Open a sandbox, and close it in any case, within 30 s, also if this task is cancelled.

    Args:
        on_close_failure: called with the error of a sandbox that cannot be closed, which is raised without it. The work
            in the sandbox is whole then, and a program may be the cause of the error.

    Raises:
        SandboxError: it does not open or close.
    """
    running = await sandbox.open()
    try:
        yield running
    finally:
        try:
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True) as scope:
                await running.close()
            if scope.cancelled_caught:
                raise SandboxError(f"{type(sandbox).__name__}: not closed within {_CLOSE_SECONDS:g} s")
        except Exception as error:
            if on_close_failure is not None:
                on_close_failure(error)
            elif isinstance(error, OSError):
                raise SandboxError(f"{type(sandbox).__name__}: not closed: {error}") from error
            else:
                raise


def log_close_failure(error: Exception) -> None:
    """The ``on_close_failure`` of :func:`opened` where there is a verdict, which it does not cost."""
    _LOG.warning("a sandbox cannot be closed: %s", error)


class Tail:
    """The last bytes of an output."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self.truncated = False

    def add(self, data: bytes) -> None:
        self._kept += data
        over = len(self._kept) - self._max_bytes
        if over > 0:
            self.truncated = True
            del self._kept[:over]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


def inner_path(path: str, workspace: str, home: str) -> str:
    """The absolute path inside that a path of :class:`RunningSandbox` means."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError.of("path", path, "a path inside the sandbox")
    whole = posixpath.join(home, path[2:]) if path.startswith("~/") else posixpath.join(workspace, path)
    return posixpath.normpath(whole)


def check_size(field: str, size: int, limits: SandboxLimits) -> None:
    """Raise if a file is larger than ``file_bytes``."""
    if size > limits.file_bytes:
        raise SandboxError(f"{field}: got {size:,} bytes; expected at most file_bytes={limits.file_bytes:,}")
