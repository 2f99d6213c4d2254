"""The launching end of the holder: an open sandbox whose commands process 1 of its namespaces runs.

Invariant: each answer goes to the request with its number; the answer to a cancelled request is awaited and discarded.
A caller that waits for an answer reads for all callers: no task outlives them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from rollouts.errors import ConfigError
from rollouts.sandboxes import archives, filesystem, holder, image_root, kernel, seccomp
from rollouts.sandboxes.base import Ability, Command, Exit, SandboxError, SandboxLimits, check_size, inner_path
from rollouts.sandboxes.control_groups import join_groups, remove_groups
from rollouts.sandboxes.running import Running, stopped_by

__all__ = ["RunningHeld", "interpreter", "open_held"]

_SETUP_SECONDS = 30.0
_GRACE_SECONDS = 30.0
_ARCHIVE_SECONDS = 300.0
_GROUPS_SECONDS = 5.0
_LINE_BYTES = 1 << 16
_Answer = tuple[dict[str, Any], list[bytes]]


@functools.cache
def interpreter() -> tuple[str, list[str]]:
    """The interpreter that runs the holder, and the folders that it needs."""
    prefixes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)} - {"/", "/usr"}
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable)), sorted(prefixes)


@functools.cache
def _sources() -> list[tuple[str, str]]:
    modules: list[ModuleType] = [kernel, seccomp, archives, filesystem, image_root, holder]
    return [
        ("rollouts", ""),
        ("rollouts.sandboxes", ""),
        *((module.__name__, inspect.getsource(module)) for module in modules),
    ]


async def open_held(running: RunningHeld, prefix: Sequence[str] = (), files: Sequence[int] = ()) -> None:
    """Start the holder of a sandbox, and its listener where it has a port.

    Args:
        running: the sandbox, which is not open yet.
        prefix: a command that starts the holder inside of namespaces.
        files: descriptors for that command; they are closed here.

    Raises:
        SandboxError: this machine cannot open it; with the step that failed.
    """
    kind = running.kind
    ours, theirs = socket.socketpair()
    try:
        with anyio.fail_after(_SETUP_SECONDS):
            try:
                await _start(running, prefix, theirs, files)
                await running.begin(ours)
            except (SandboxError, OSError) as error:
                raise SandboxError(f"{kind}: the sandbox could not be set up: {error}") from None
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await running.close()
        ours.close()
        if isinstance(error, TimeoutError):
            raise SandboxError(f"{kind}: not set up within {_SETUP_SECONDS:g} s") from None
        raise
    finally:
        theirs.close()
        for number in files:
            os.close(number)


async def _start(running: RunningHeld, prefix: Sequence[str], control: socket.socket, files: Sequence[int]) -> None:
    request = {**running.settings, "modules": _sources(), "bubblewrap": bool(prefix), "control": control.fileno()}
    text = msgspec.json.encode(request)
    line = [*prefix, interpreter()[0], "-I", "-S", "-X", "utf8", "-c", holder.BOOT, str(len(text))]
    with anyio.CancelScope(shield=True):  # a process that is cancelled while it starts would have no owner
        process = running.process = await anyio.open_process(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[control.fileno(), *files],
            env={},
            cwd="/",
            start_new_session=True,
        )
    join_groups(running.settings["groups"], process.pid)  # it waits for the request before it starts anything
    assert process.stdin is not None
    with contextlib.suppress(anyio.BrokenResourceError):  # its end is seen by the first answer
        await process.stdin.send(text)


class RunningHeld(Running):
    """An open sandbox of a kind with a holder.

    Args:
        kind: the kind's name, for messages.
        settings: of the holder: ``port`` of the listener or ``None``, ``user``, ``home``, ``cwd``, ``files``,
            ``readable``, ``image``, ``groups`` of control, and the limits.
        env: the variables of every command.
        limits: the limits, again.
        abilities: those of the kind.
    """

    listener: socket.socket | None = None
    process: Process | None = None
    send_seconds = _ARCHIVE_SECONDS
    """Deadline of sending one request: the holder does nothing else while it packs or unpacks."""
    _control: socket.socket | None = None

    def __init__(
        self,
        kind: str,
        settings: Mapping[str, Any],
        env: Mapping[str, str],
        limits: SandboxLimits,
        abilities: frozenset[Ability],
    ) -> None:
        super().__init__()
        self.kind, self.settings, self.abilities = kind, settings, abilities
        self.workspace, self.home = settings["cwd"], settings["home"]
        self._env, self._limits = env, limits
        self._count = 0
        self._waiting: set[int] = set()
        self._arrived: dict[int, _Answer] = {}
        self._sending = anyio.Lock()
        self._is_read = False
        self._news = anyio.Event()

    async def begin(self, control: socket.socket) -> None:
        """Wait for the holder's first words."""
        assert self.process is not None
        assert self.process.stdout is not None
        self._answers = BufferedByteReceiveStream(self.process.stdout)
        self._control = control
        try:
            self._waiting.add(0)
            await self._arrival(0)
            report, _ = self._arrived.pop(0)
            self._waiting.discard(0)
            self.home = report["home"]
            if self.settings["port"] is not None:
                _, (descriptor,), _, _ = socket.recv_fds(control, 1, 1)
                self.listener = socket.socket(fileno=descriptor)
                self.listener.setblocking(False)
        except _GONE:
            raise SandboxError(await self._last_words()) from None

    def url_inside(self, port: int | None = None) -> str:
        """The listener's address inside; in the machine's network, that of the server's port."""
        if self.settings["port"] is not None:
            return f"http://127.0.0.1:{self.settings['port']}"
        if port is None:
            raise ConfigError.of("port", port, "the server's port: this sandbox has no separate network")
        return f"http://127.0.0.1:{port}"

    async def _command(self, command: Command) -> Exit:
        keep = "keep_processes" in self.abilities
        request: dict[str, Any] = {"op": "run", "argv": list(command.argv), "env": {**self._env, **command.env}}
        request |= {"cwd": command.cwd, "seconds": command.seconds, "user": command.user, "keep": keep}
        async with contextlib.nullcontext() if keep else self._turn:
            report, (out, errors) = await self._ask(request, command.stdin, command.stop)
        return Exit(
            report["code"],
            out.decode(errors="replace"),
            errors.decode(errors="replace"),
            report["seconds"],
            report["timed_out"],
            report["truncated"],
        )

    async def kill_all(self) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        with anyio.move_on_after(_GRACE_SECONDS) as scope:
            await self._ask({"op": "kill_all"})
        if scope.cancelled_caught:
            raise SandboxError(f"a process is not gone {_GRACE_SECONDS:g} s after it was killed")

    async def read(self, path: str) -> bytes | None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        report, parts = await self._ask({"op": "read", "path": inner_path(path, self.workspace, self.home)})
        if report.get("too_large"):
            raise SandboxError(f"path {path!r}: got a larger file; expected at most {self._limits.file_bytes:,} bytes")
        return parts[0] if parts else None

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        check_size(f"path {path!r}", len(data), self._limits)
        place = inner_path(path, self.workspace, self.home)
        report, _ = await self._ask({"op": "write", "path": place, "mode": mode}, bytes(data))
        if "error" in report:
            raise SandboxError(f"path: got {path!r}, which cannot be written: {report['error']}")

    async def pack(self, path: str, archive: str | os.PathLike[str]) -> bool:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        report = await self._archived("pack", path, archive, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if not report["found"]:
            os.unlink(archive)
        return bool(report["found"])

    async def unpack(self, archive: str | os.PathLike[str], folder: str) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        await self._archived("unpack", folder, archive, os.O_RDONLY)

    async def _archived(self, op: str, path: str, archive: str | os.PathLike[str], mode: int) -> dict[str, Any]:
        place = inner_path(path, self.workspace, self.home)
        descriptor = os.open(archive, mode | os.O_CLOEXEC, 0o600)
        try:
            with anyio.move_on_after(_ARCHIVE_SECONDS):
                report, _ = await self._ask({"op": op, "path": place}, descriptor=descriptor)
                if "error" in report:
                    raise SandboxError(f"{op} {path!r}: {report['error']}")
                return report
        finally:
            os.close(descriptor)
        raise SandboxError(f"{op} {path!r}: not done within {_ARCHIVE_SECONDS:g} s")

    async def close(self) -> None:
        """End the holder, and with it every process and file of the namespaces."""
        if not self._closed:
            self._closed = True
            for end in (self.listener, self._control):
                if end is not None:
                    end.close()
            await _end(self.process)
            with anyio.move_on_after(_GROUPS_SECONDS):
                while remove_groups(self.settings["groups"]):  # noqa: ASYNC110 - no event says when a process is gone
                    await anyio.sleep(0.01)

    # -- requests and answers --

    async def _ask(
        self,
        request: Mapping[str, Any],
        data: bytes = b"",
        stop: anyio.Event | None = None,
        descriptor: int | None = None,
    ) -> _Answer:
        """Send one request and receive its answer. A cancelled command is ended, and its answer is awaited."""
        self._check_open()
        self._count += 1
        number = self._count
        self._waiting.add(number)
        try:
            try:
                await self._send({**request, "number": number, "bytes": len(data)}, data, descriptor)
                async with stopped_by(stop):
                    await self._arrival(number)
                if number not in self._arrived:  # the event was set: the answer has the output so far
                    with anyio.move_on_after(_GRACE_SECONDS):
                        await self._stop(number)
                if number not in self._arrived:
                    raise SandboxError(f"a command is not gone {_GRACE_SECONDS:g} s after it was stopped")
                return self._arrived[number]
            except anyio.get_cancelled_exc_class():
                with anyio.move_on_after(_GRACE_SECONDS, shield=True) as scope:
                    await (self._stop(number) if request["op"] == "run" else self._arrival(number))
                if scope.cancelled_caught and self.process is not None:
                    self.process.kill()
                raise
            finally:
                self._waiting.discard(number)
                self._arrived.pop(number, None)
        except _GONE:
            raise SandboxError(f"the sandbox ended: {await self._last_words()}") from None

    async def _stop(self, number: int) -> None:
        if number not in self._arrived:
            await self._send({"op": "stop", "of": number})
        await self._arrival(number)

    async def _send(self, request: Mapping[str, Any], data: bytes = b"", descriptor: int | None = None) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with anyio.move_on_after(self.send_seconds, shield=True) as scope:  # half a request would spoil the next
            async with self._sending:
                if descriptor is not None:
                    assert self._control is not None
                    socket.send_fds(self._control, [b"f"], [descriptor])
                line = json.dumps(request)  # not msgspec: an argument may have bytes that are not UTF-8
                await self.process.stdin.send(line.encode() + b"\n")
                if data:
                    await self.process.stdin.send(data)
        if scope.cancelled_caught:
            self.process.kill()
            raise SandboxError(f"a request is not read {self.send_seconds:g} s after it was sent")

    async def _arrival(self, number: int) -> None:
        while number not in self._arrived:
            if self._is_read:
                await self._news.wait()
                continue
            self._is_read = True
            try:
                await self._receive()
            finally:
                self._is_read = False
                self._news.set()  # wakes the next who reads, also where this one is cancelled
                self._news = anyio.Event()

    async def _receive(self) -> None:
        head: dict[str, Any] = msgspec.json.decode(await self._answers.receive_until(b"\n", _LINE_BYTES))
        with anyio.CancelScope(shield=True):  # the holder writes it at once; the rest of it would spoil the next
            parts = [await self._answers.receive_exactly(size) for size in head["sizes"]]
        if head["number"] in self._waiting:
            self._arrived[head["number"]] = head, parts

    async def _last_words(self) -> str:
        assert self.process is not None
        assert self.process.stderr is not None
        parts = []
        with anyio.move_on_after(1.0), contextlib.suppress(anyio.EndOfStream, anyio.ClosedResourceError):
            while True:
                parts.append(await self.process.stderr.receive())
        lines = b"".join(parts).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"


_GONE = (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


async def _end(process: Process | None) -> None:
    if process is not None:
        assert process.stdin is not None
        await process.stdin.aclose()
        with anyio.move_on_after(5.0):
            await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.aclose()
