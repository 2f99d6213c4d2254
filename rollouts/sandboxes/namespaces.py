"""The kind ``namespaces``: Linux namespaces for network, processes, files and users, without a daemon.

Invariant: the program sees the system folders and ``readable``, all read-only, an empty ``/workspace``, ``/tmp`` and
home in memory, its own processes, and a loopback interface where only our listener answers. The listener is made
inside and its descriptor is passed out, so that a server of this process answers in the sandbox. All of it ends with
this process.

bubblewrap makes the namespaces where it is installed, except for root: bubblewrap would leave the program as root
outside, whose processes no limit counts. The holder does so otherwise, and maps the program to a user without rights.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import anyio
import attrs
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from rollouts.base.validators import as_texts, is_int
from rollouts.concurrency.task_groups import first_error
from rollouts.errors import ConfigError
from rollouts.sandboxes import filesystem, holder, kernel
from rollouts.sandboxes.base import (
    GATEWAY_PORT,
    HOME_ENVIRONMENT,
    Ability,
    Command,
    Exit,
    SandboxError,
    SandboxLimits,
    check_size,
    inner_path,
)
from rollouts.sandboxes.containment import Containment
from rollouts.sandboxes.running import Running

__all__ = ["NamespaceSandbox"]

_SETUP_SECONDS = 30.0
_GRACE_SECONDS = 30.0
_LINE_BYTES = 1 << 16
_WORKSPACE, _HOME = "/workspace", "/home/agent"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_PUBLIC = (*filesystem.SYSTEM_FILES, "/etc/alternatives", "/etc/ssl/certs", "/etc/ca-certificates")
"""Files of ``/etc`` that programs need: the linker's, the names of commands, public certificates."""
_FILES = {
    "/etc/passwd": "root:x:0:0::/:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n",
    "/etc/group": "root:x:0:\nagent:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_OWN = ("/", "/dev", "/proc", "/tmp", "/workspace", "/home", "/home/agent", "/etc")


def _check_readable(instance: NamespaceSandbox, field: Any, value: Any) -> None:
    for path in value:
        if not isinstance(path, str) or not os.path.isabs(path) or not os.path.exists(path) or path in _OWN:
            expected = "absolute paths of files and folders that exist, none of which the sandbox makes itself"
            raise ConfigError.of("NamespaceSandbox.readable", path, expected)


def _check_port(instance: NamespaceSandbox, field: Any, value: Any) -> None:
    if not is_int(value, 1024) or value > 65535:
        raise ConfigError.of("NamespaceSandbox.port", value, "a port from 1024 to 65535")


def _normal(paths: Any) -> Any:
    return tuple(os.path.normpath(path) if isinstance(path, str) else path for path in as_texts(paths))


@attrs.frozen
class NamespaceSandbox:
    """Linux namespaces: no network but our listener, the machine's programs read-only, files in memory."""

    readable: Sequence[str] = attrs.field(default=(), converter=_normal, validator=_check_readable)
    """Further files and folders that the program may read and run, at the same path; the system's are shown."""
    limits: SandboxLimits = attrs.field(factory=SandboxLimits)
    port: int = attrs.field(default=GATEWAY_PORT, validator=_check_port)
    """The listener's port on the sandbox's loopback."""
    bubblewrap: bool | None = attrs.field(default=None)
    """Whether bubblewrap makes the namespaces; by default if it is installed and we are not root."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """None beyond the protocol's minimum."""
        return frozenset()

    @property
    def _bubblewrap(self) -> str | None:
        if self.bubblewrap is None and os.geteuid() == 0:
            return None
        return None if self.bubblewrap is False else shutil.which("bwrap")

    def containment(self) -> Containment:
        """The limits that the namespaces enforce; :meth:`open` raises where the machine cannot make namespaces."""
        boxed = self._bubblewrap is not None
        root_outside = boxed and os.geteuid() == 0
        how: dict[str, str | None] = {
            "seconds": "everything is killed at the deadline",
            "cpu_seconds": None,
            "memory": "RLIMIT_DATA, of each process",
            "processes": None if root_outside else "RLIMIT_NPROC in a user namespace",
            "file_size": "RLIMIT_FSIZE",
            "disk": "file systems in memory, of that size",
            "output": "the last bytes are kept",
            "network": "a network namespace, in which only our listener answers",
            "writing": "a separate file system",
            "reading": "a separate file system",
            "signals": "a process namespace",
            "survivors": "a process namespace",
            "privileges": None if root_outside else "no capability, not root",
            "environment": "not passed on",
            "descriptors": "closed except the three streams",
        }
        reasons = dict.fromkeys(("processes", "privileges"), "bubblewrap maps the program to root outside")
        reasons["cpu_seconds"] = "only wall time is limited"
        return Containment(
            {name: text for name, text in how.items() if text is not None},
            {name: reasons[name] for name, text in how.items() if text is None},
            ("namespaces", "bubblewrap") if boxed else ("namespaces", "user"),
        )

    async def open(self) -> RunningNamespaces:
        """Make the namespaces, the files and the listener."""
        if sys.platform != "linux":
            raise SandboxError(f"namespaces: got {sys.platform}; expected Linux")
        program = self._bubblewrap
        if self.bubblewrap and program is None:
            raise SandboxError("bubblewrap: got True, but bwrap is not installed; expected it in PATH")
        ours, theirs = socket.socketpair()
        process: Process | None = None
        try:
            with anyio.fail_after(_SETUP_SECONDS):
                process = await self._start(program, theirs)
                running = RunningNamespaces(self, process)
                try:
                    await running.ask({})
                    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
                except (SandboxError, OSError) as error:
                    raise SandboxError(f"namespaces: the sandbox could not be set up: {error}") from None
                running.listener = socket.socket(fileno=descriptors[0])
                running.listener.setblocking(False)
                return running
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await _end(process)
            if isinstance(error, TimeoutError):
                raise SandboxError(f"namespaces: not set up within {_SETUP_SECONDS:g} s") from None
            raise
        finally:
            ours.close()
            theirs.close()

    async def _start(self, program: str | None, control: socket.socket) -> Process:
        python, prefixes = _interpreter()
        readable = [*_PUBLIC, python, *prefixes, *self.readable]
        request = {
            **attrs.asdict(self.limits),
            "modules": _sources(),
            "bubblewrap": program is not None,
            "control": control.fileno(),
            "port": self.port,
            "home": _HOME,
            "readable": readable,
            "files": _FILES,
        }
        text = msgspec.json.encode(request)
        line = [python, "-I", "-S", "-X", "utf8", "-c", holder.BOOT, str(len(text))]
        files: list[int] = []
        try:
            if program is not None:
                files = [_memory_file(content) for content in _FILES.values()]
                line = [*_in_bubblewrap(program, self.limits.disk_bytes, readable, files), *line]
            process = await anyio.open_process(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[control.fileno(), *files],
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            for number in files:
                os.close(number)
        assert process.stdin is not None
        with contextlib.suppress(anyio.BrokenResourceError):  # its end is seen by the first answer
            await process.stdin.send(text)
        return process


@functools.cache
def _interpreter() -> tuple[str, list[str]]:
    """The interpreter that runs the holder, and the folders that it needs."""
    prefixes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)} - {"/", "/usr"}
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable)), sorted(prefixes)


@functools.cache
def _sources() -> list[tuple[str, str]]:
    modules: list[ModuleType] = [kernel, filesystem, holder]
    return [
        ("rollouts", ""),
        ("rollouts.sandboxes", ""),
        *((module.__name__, inspect.getsource(module)) for module in modules),
    ]


def _memory_file(text: str) -> int:
    number = os.memfd_create("file")
    os.write(number, text.encode())
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _in_bubblewrap(program: str, disk: int, readable: Sequence[str], files: Sequence[int]) -> list[str]:
    """The command that starts the holder as process 1 of namespaces that bubblewrap makes."""
    line = [program, "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    line += ["--hostname", "sandbox", "--as-pid-1", "--new-session", "--cap-drop", "ALL"]
    for path in ("/tmp", _WORKSPACE, _HOME):  # first: readable folders may lie below
        line += ["--size", str(disk), "--tmpfs", path]
    for path in filesystem.SYSTEM:
        if os.path.islink(path):
            line += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            line += ["--ro-bind", path, path]
    for path in readable:
        line += ["--ro-bind-try", path, path]
    for path, number in zip(_FILES, files, strict=True):
        line += ["--ro-bind-data", str(number), path]
    line += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--size", str(disk), "--tmpfs", "/dev/shm"]
    return [*line, "--remount-ro", "/", "--chdir", _WORKSPACE, "--"]


class RunningNamespaces(Running):
    """An open sandbox of the kind ``namespaces``."""

    workspace, home = _WORKSPACE, _HOME
    listener: socket.socket | None = None

    def __init__(self, kind: NamespaceSandbox, process: Process) -> None:
        super().__init__()
        assert process.stdout is not None
        self._kind, self._process = kind, process
        self._answers = BufferedByteReceiveStream(process.stdout)
        self._answer_due = False

    def url_inside(self, port: int | None = None) -> str:
        """The listener's address inside."""
        return f"http://127.0.0.1:{self._kind.port}"

    async def _command(self, command: Command) -> Exit:
        env = {"PATH": _PATH, "HOME": _HOME, "TMPDIR": "/tmp"} | HOME_ENVIRONMENT
        request: dict[str, Any] = {"op": "run", "argv": list(command.argv), "env": env | dict(command.env)}
        request |= {"cwd": command.cwd, "seconds": command.seconds}
        report, (out, errors) = await self.ask(request, command.stdin, command.stop)
        return Exit(
            report["code"],
            out.decode(errors="replace"),
            errors.decode(errors="replace"),
            report["seconds"],
            report["timed_out"],
            report["truncated"],
        )

    async def read(self, path: str) -> bytes | None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        report, parts = await self.ask({"op": "read", "path": inner_path(path, _WORKSPACE, _HOME)})
        if report.get("too_large"):
            raise SandboxError(
                f"path {path!r}: got a larger file; expected at most {self._kind.limits.file_bytes:,} bytes"
            )
        return parts[0] if parts else None

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        check_size(f"path {path!r}", len(data), self._kind.limits)
        report, _ = await self.ask(
            {"op": "write", "path": inner_path(path, _WORKSPACE, _HOME), "mode": mode}, bytes(data)
        )
        if "error" in report:
            raise SandboxError(f"path: got {path!r}, which cannot be written: {report['error']}")

    async def close(self) -> None:
        """End the holder, and with it every process and file of the namespaces."""
        if not self._closed:
            self._closed = True
            if self.listener is not None:
                self.listener.close()
            await _end(self._process)

    async def ask(
        self,
        request: Mapping[str, Any],
        data: bytes = b"",
        stop: anyio.Event | None = None,
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send one request, if it is not empty, and receive one answer.

        A cancelled request is ended and its answer is discarded, so that the next answer belongs to the next request.
        """
        async with self._turn:
            self._check_open()
            try:
                with anyio.CancelScope(shield=True):  # half a request would spoil the next
                    if request:
                        await self._send({**request, "bytes": len(data)}, data)
                self._answer_due = True
                try:
                    return await self._receive(stop)
                except anyio.get_cancelled_exc_class():
                    with anyio.move_on_after(_GRACE_SECONDS, shield=True) as scope:
                        if self._answer_due:
                            await self._send({"op": "kill"})
                            await self._receive()
                    if scope.cancelled_caught:
                        self._process.kill()
                    raise
            except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                raise SandboxError(f"the sandbox ended: {await self._last_words()}") from None

    async def _send(self, head: Mapping[str, Any], data: bytes = b"") -> None:
        assert self._process.stdin is not None
        await self._process.stdin.send(msgspec.json.encode(head) + b"\n")
        if data:
            await self._process.stdin.send(data)

    async def _receive(self, stop: anyio.Event | None = None) -> tuple[dict[str, Any], list[bytes]]:
        if stop is None:
            return await self._read_answer()
        async with first_error() as tasks:
            tasks.start_soon(self._kill, stop)
            answer = await self._read_answer()
            tasks.cancel_scope.cancel()
        return answer

    async def _kill(self, stop: anyio.Event) -> None:
        await stop.wait()
        with anyio.CancelScope(shield=True):
            await self._send({"op": "kill"})

    async def _read_answer(self) -> tuple[dict[str, Any], list[bytes]]:
        head: dict[str, Any] = msgspec.json.decode(await self._answers.receive_until(b"\n", _LINE_BYTES))
        with anyio.CancelScope(shield=True):  # the holder writes it at once; the rest of it would spoil the next
            parts = [await self._answers.receive_exactly(size) for size in head["sizes"]]
        self._answer_due = False
        return head, parts

    async def _last_words(self) -> str:
        parts = []
        with anyio.move_on_after(1.0), contextlib.suppress(anyio.EndOfStream, anyio.ClosedResourceError):
            assert self._process.stderr is not None
            while True:
                parts.append(await self._process.stderr.receive())
        lines = b"".join(parts).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"


async def _end(process: Process | None) -> None:
    if process is not None:
        assert process.stdin is not None
        await process.stdin.aclose()
        with anyio.move_on_after(5.0):
            await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.aclose()
