"""The kind ``process``: a process group with a separate folder and home, and few environment variables.

Invariant: the group is killed when its command ends, reaches its deadline or is cancelled. Nothing else is contained:
the program has the rights of this process and reaches whatever this machine reaches. For programs that you trust.

It needs nothing of the operating system. Each sandbox has a separate folder, so paths differ between them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import anyio.to_thread
import attrs
from anyio.abc import ByteReceiveStream, Process

from rollouts.errors import ConfigError
from rollouts.sandboxes import archives
from rollouts.sandboxes.base import (
    HOME_ENVIRONMENT,
    Ability,
    Command,
    Exit,
    SandboxError,
    SandboxLimits,
    Tail,
    check_size,
    inner_path,
)
from rollouts.sandboxes.containment import NAMES, Containment
from rollouts.sandboxes.leftovers import Folders
from rollouts.sandboxes.removal import remove_tree
from rollouts.sandboxes.running import Running

__all__ = ["ProcessSandbox"]

_DRAIN_SECONDS = 1.0
"""How long outputs are read after the group is killed: a process that left the group may hold them open."""

_ENFORCED = {
    "seconds": "the process group is killed at the deadline",
    "output": "the last bytes are kept",
    "environment": "not passed on, except PATH",
    "descriptors": "closed except the three streams",
}


@attrs.frozen
class ProcessSandbox:
    """Processes of this machine, in a separate folder. Nothing is contained."""

    limits: SandboxLimits = attrs.field(factory=SandboxLimits)

    @property
    def abilities(self) -> frozenset[Ability]:
        """None beyond the protocol's minimum."""
        return frozenset()

    def containment(self) -> Containment:
        """Deadline and output only."""
        others = {name: "a process with all rights of this one" for name in NAMES if name not in _ENFORCED}
        others["survivors"] = "a process that leaves its group is not found"
        return Containment(_ENFORCED, others, ())

    async def open(self) -> RunningProcess:
        """Make the folders."""
        folder = await anyio.to_thread.run_sync(_new_folder)
        return RunningProcess(folder, self.limits)


def _new_folder() -> str:
    folder = _FOLDERS.new()
    for name in ("workspace", "home", "tmp"):
        os.mkdir(os.path.join(folder, name))
    return folder


_FOLDERS = Folders("sandbox")


class RunningProcess(Running):
    """An open sandbox of the kind ``process``."""

    listener = None

    def __init__(self, folder: str, limits: SandboxLimits) -> None:
        super().__init__()
        self._folder, self._limits = folder, limits
        self._under_way: Process | None = None
        self.workspace = os.path.join(folder, "workspace")
        self.home = os.path.join(folder, "home")

    def url_inside(self, port: int | None = None) -> str:
        """Loopback of this machine."""
        if port is None:
            raise ConfigError.of("port", port, "the server's port: this sandbox has no separate network")
        return f"http://127.0.0.1:{port}"

    async def _command(self, command: Command) -> Exit:
        async with self._turn:
            self._check_open()
            self._under_way = None
            variables = {"PATH": os.environ.get("PATH", os.defpath), "HOME": self.home}
            variables["TMPDIR"] = os.path.join(self._folder, "tmp")
            if sys.platform == "win32":
                variables |= {"TEMP": variables["TMPDIR"], "TMP": variables["TMPDIR"], "USERPROFILE": self.home}
                variables["SYSTEMROOT"] = os.environ.get("SYSTEMROOT", "")
            began = time.monotonic()
            try:
                process = await anyio.open_process(
                    list(command.argv),
                    stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
                    cwd=command.cwd,
                    env=variables | HOME_ENVIRONMENT | dict(command.env),
                    start_new_session=True,
                )
            except OSError as error:
                return Exit(127, "", f"{command.argv[0]}: {error.strerror or error}", time.monotonic() - began)
            out, errors = Tail(self._limits.output_bytes), Tail(self._limits.output_bytes)
            self._under_way = process
            try:
                timed_out = await _watch(process, command, (out, errors))
            finally:
                _kill_group(process)
                with anyio.CancelScope(shield=True):
                    await process.aclose()
            code = -signal.SIGKILL if process.returncode is None else process.returncode
            took = time.monotonic() - began
            return Exit(int(code), out.text, errors.text, took, timed_out, out.truncated or errors.truncated)

    async def read(self, path: str) -> bytes | None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        place = self._place(path)

        def load() -> bytes | None:
            if not os.path.isfile(place) or not self._is_inside(place):
                return None
            check_size(f"path {path!r}", os.path.getsize(place), self._limits)
            try:
                return Path(place).read_bytes()
            except OSError:
                return None

        return await anyio.to_thread.run_sync(load)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        place = self._place(path)
        check_size(f"path {path!r}", len(data), self._limits)

        def store() -> None:
            if not self._is_inside(os.path.dirname(place)):
                raise SandboxError(f"path: got {path!r}, below a link to a folder outside; expected a file inside")
            try:
                os.makedirs(os.path.dirname(place), exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(place)  # it may be a link or a pipe
                with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)
                os.chmod(place, mode)
            except OSError as error:
                raise SandboxError(f"path: got {path!r}, which cannot be written: {error.strerror}") from error

        await anyio.to_thread.run_sync(store)

    async def kill_all(self) -> None:
        """Kill the group of the command under way; a process that left its group is not found."""
        self._check_open()
        if self._under_way is not None and self._under_way.returncode is None:
            _kill_group(self._under_way)
        async with self._turn:  # until it has ended
            pass

    async def pack(self, path: str, archive: str | os.PathLike[str]) -> bool:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        place = self._place(path)

        def store() -> bool:
            if not self._is_inside(os.path.dirname(place)):
                return False
            try:
                with open(archive, "wb") as file:
                    found = archives.pack(place, file, self._limits.disk_bytes)
            except OSError as error:
                raise SandboxError(f"pack {path!r}: {error.strerror or error}") from error
            if not found:
                os.unlink(archive)
            return found

        return await anyio.to_thread.run_sync(store)

    async def unpack(self, archive: str | os.PathLike[str], folder: str) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        place = self._place(folder)

        def load() -> None:
            if not self._is_inside(place):
                raise SandboxError(f"unpack {folder!r}: a link to a folder outside; expected a folder inside")
            try:
                with open(archive, "rb") as file:
                    archives.unpack(file, place, self._limits.disk_bytes)
            except OSError as error:
                raise SandboxError(f"unpack {folder!r}: {error.strerror or error}") from error

        await anyio.to_thread.run_sync(load)

    async def close(self) -> None:
        """Delete the folder.

        Raises:
            SandboxError: a file cannot be deleted, or a process that left its group still writes.
        """
        self._closed = True
        try:
            await anyio.to_thread.run_sync(_remove, self._folder)
        except OSError as error:
            raise SandboxError(f"{self._folder}: cannot be deleted: {error.strerror or error}") from error

    def _place(self, path: str) -> str:
        self._check_open()
        place = inner_path(path, self.workspace, self.home)
        if os.path.commonpath([place, self._folder]) != self._folder:
            raise ConfigError.of("path", path, f"a path in {self._folder}")
        return place

    def _is_inside(self, place: str) -> bool:
        return os.path.commonpath([os.path.realpath(place), self._folder]) == self._folder


async def _watch(process: Process, command: Command, tails: tuple[Tail, Tail]) -> bool:
    """Wait for the end of a process; return whether it reached the deadline."""

    async def receive(stream: ByteReceiveStream | None, tail: Tail) -> None:
        assert stream is not None
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in stream:
                tail.add(chunk)

    async def send() -> None:
        if process.stdin is not None:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await process.stdin.send(command.stdin)
            await process.stdin.aclose()

    async def kill(stop: anyio.Event) -> None:
        await stop.wait()
        _kill_group(process)

    async with anyio.create_task_group() as group:
        group.start_soon(receive, process.stdout, tails[0])
        group.start_soon(receive, process.stderr, tails[1])
        group.start_soon(send)
        with anyio.move_on_after(command.seconds) as scope:
            async with anyio.create_task_group() as stops:
                if command.stop is not None:
                    stops.start_soon(kill, command.stop)
                await process.wait()
                stops.cancel_scope.cancel()
        _kill_group(process)
        group.cancel_scope.deadline = anyio.current_time() + _DRAIN_SECONDS
    return scope.cancelled_caught


def _kill_group(process: Process) -> None:
    """Kill the process and its group, which may outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _remove(folder: str) -> None:
    if sys.platform == "win32":
        shutil.rmtree(folder, ignore_errors=True)
    elif os.path.isdir(folder):
        remove_tree(folder)
