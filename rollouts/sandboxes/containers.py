"""The kind ``container``: one container of Docker or Podman for each rollout, through the daemon's HTTP API.

Invariant: the container is removed with its files when the sandbox is closed. With ``network="none"`` it has a loopback
interface only; the listener is made in its network namespace, for which this process must be root on the daemon's
machine. With ``network="bridge"`` the program reaches this machine and the internet.

The image needs ``sh``, ``mkdir``, ``chown`` and ``rm``. No image is pulled. Its tests run against a real Podman
with ``scripts/test --containers``.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import posixpath
import re
import secrets
import shlex
import socket
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import attrs

from rollouts.base.validators import check, is_number
from rollouts.errors import ConfigError
from rollouts.sandboxes import archives
from rollouts.sandboxes.base import (
    BOOLEAN,
    FIRST_PROCESS,
    GATEWAY_PORT,
    HOME_ENVIRONMENT,
    NON_EMPTY,
    Ability,
    Command,
    Exit,
    SandboxError,
    SandboxLimits,
    Tail,
    check_size,
    inner_path,
)
from rollouts.sandboxes.containment import Containment
from rollouts.sandboxes.docker_api import DockerApi, DockerError, Request
from rollouts.sandboxes.running import Running, stopped_by

__all__ = ["ContainerSandbox"]

_WORKSPACE, _HOME = "/workspace", "/home/agent"
_SETUP_SECONDS, _GRACE_SECONDS = 60.0, 20.0
_START_SECONDS = 30.0
"""Time in which the shell of a command must write the number of its process group; until then it is not killed."""
_NEW_NETWORK = 0x40000000
_HOST = "host.docker.internal"
_DOCKER = "/var/run/docker.sock"
_SET_UP_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""Of root in the container, who makes the folders and ends the processes; a user who is not root has none of them."""
_ROOT_CAPABILITIES = (
    *_SET_UP_CAPABILITIES,
    *("AUDIT_WRITE", "FSETID", "MKNOD", "NET_BIND_SERVICE", "SETFCAP", "SETPCAP", "SYS_CHROOT"),
)
"""Those of Docker's default (moby 27, oci/caps/defaults.go), for a program that is root and installs packages."""
_OF_RUNTIME = "unable to start container process"
_SHOWN, _SHOWN_PROCESSES = 80, 5
_UNKNOWN_GROUP = (
    "{} {}; its group of processes is not known, and every process of the container was killed: expected an engine "
    "that starts it, and an sh in the container that writes to its standard error"
)
_BEFORE = 4096
"""Bytes before the line with the number of a process, at most."""
_WAITS = "sleep 3600"
"""The command that process 1 waits for."""
_COLUMNS = "user,pid,ppid,args"
_ROOT = ("root", "0")
_OPEN_FILES, _PROCESSES = 4096, 4096
"""Podman asks for more by itself, which a machine without CAP_SYS_RESOURCE refuses."""
_CPUS = check("a number > 0, or None", lambda value: value is None or (is_number(value) and value > 0))
_OR_NONE = check("a non-empty string, or None", lambda value: value is None or (isinstance(value, str) and bool(value)))


@attrs.frozen
class ContainerSandbox:
    """Containers of Docker or Podman."""

    image: str = attrs.field(validator=NON_EMPTY)
    """Name of an image that the daemon has."""
    api: str = attrs.field(default=_DOCKER, validator=NON_EMPTY)
    """The daemon's unix socket; Podman's is ``/run/podman/podman.sock``."""
    network: Literal["none", "bridge"] = attrs.field(
        default="none", validator=check('"none" or "bridge"', lambda value: value in ("none", "bridge"))
    )
    user: str | None = attrs.field(default="1000:1000", validator=_OR_NONE)
    """User and group of the program, as ``--user`` of ``docker run``; ``None``: the image's."""
    workdir: str | None = attrs.field(default=_WORKSPACE, validator=_OR_NONE)
    """The workspace, which is made where it is missing; ``None``: the image's."""
    home: str | None = attrs.field(default=_HOME, validator=_OR_NONE)
    """The home folder, which is made where it is missing; ``None``: that of the user in the image."""
    env: Mapping[str, str] = attrs.field(factory=dict, converter=dict)
    """Variables of every command, in addition to the image's."""
    cpus: float | None = attrs.field(default=None, validator=_CPUS)
    """Processors, as ``--cpus`` of ``docker run``; ``None``: no limit."""
    keep_processes: bool = attrs.field(default=False, validator=BOOLEAN)
    """Whether commands run at once, and what one leaves running lives on in the next."""
    limits: SandboxLimits = attrs.field(factory=SandboxLimits)

    @property
    def abilities(self) -> frozenset[Ability]:
        """``users``, and ``keep_processes`` where it is set."""
        return frozenset({"users", "keep_processes"} if self.keep_processes else {"users"})

    def containment(self) -> Containment:
        """The limits that the daemon is asked to enforce."""
        enforced = {
            "seconds": "everything is killed at the deadline",
            "memory": "a control group",
            "processes": "a control group",
            "file_size": "RLIMIT_FSIZE",
            "output": "the last bytes are kept",
            "writing": "the container's file system",
            "reading": "the image",
            "signals": "a process namespace",
            "survivors": "a process namespace",
            "environment": "not passed on",
            "descriptors": "the daemon's streams",
        }
        reasons = {
            "cpu_seconds": "only wall time is limited",
            "disk": "the container's layer grows with the daemon's disk",
        }
        if self.network == "none":
            enforced["network"] = "loopback only, in which our listener answers"
        else:
            reasons["network"] = "a bridge, from which this machine and the internet are reached"
        if self.cpus is not None:
            reasons["cpu_seconds"] = f"wall time is limited, and {self.cpus:g} processors"
        if self.user is None:
            reasons["privileges"] = "the user of the image, who may be root in the container"
        elif _is_root(self.user):
            reasons["privileges"] = "the program is root in the container, with the capabilities that Docker leaves"
        else:
            enforced["privileges"] = "no capability, not root"
        return Containment(enforced, reasons, ())

    @property
    def _not_root(self) -> bool:
        return self.user is not None and not _is_root(self.user)

    async def open(self) -> RunningContainer:
        """Create and start a container, with an empty workspace."""
        api = DockerApi(self.api)
        body: dict[str, Any] = {
            "Image": self.image,
            "Entrypoint": list(FIRST_PROCESS),
            "Cmd": [],
            "User": "0:0",  # of process 1 only
            "WorkingDir": "/",
            "Labels": {"rollouts.sandbox": "1"},
            "NetworkDisabled": self.network == "none",
            "HostConfig": {
                "NetworkMode": self.network,
                "Memory": self.limits.memory_bytes,
                "PidsLimit": self.limits.processes,
                "CapDrop": ["ALL"],
                "CapAdd": list(_SET_UP_CAPABILITIES if self._not_root else _ROOT_CAPABILITIES),
                "SecurityOpt": ["no-new-privileges"],
                "Ulimits": [
                    {"Name": "nofile", "Soft": _OPEN_FILES, "Hard": _OPEN_FILES},
                    {"Name": "nproc", "Soft": _PROCESSES, "Hard": _PROCESSES},
                    {"Name": "fsize", "Soft": self.limits.file_bytes, "Hard": self.limits.file_bytes},
                    {"Name": "core", "Soft": 0, "Hard": 0},
                ],
            },
        }
        if self.cpus is not None:
            body["HostConfig"]["NanoCpus"] = round(self.cpus * 1e9)
        if self.network == "bridge":
            body["HostConfig"]["ExtraHosts"] = [f"{_HOST}:host-gateway"]
        with anyio.move_on_after(_SETUP_SECONDS):
            with anyio.CancelScope(shield=True):  # a container whose creation is cut would have no owner
                created = await api.json("POST", "/containers/create", None, body)
            running = RunningContainer(self, api, created["Id"])
            try:
                await api.json("POST", f"/containers/{running.id}/start")
                await running.begin()
                if self.network == "none":
                    state = (await api.json("GET", f"/containers/{running.id}/json"))["State"]
                    running.listener = await anyio.to_thread.run_sync(_listen_in_network_of, state["Pid"])
            except BaseException:
                with anyio.move_on_after(_GRACE_SECONDS, shield=True):
                    await running.close()
                raise
            return running
        raise SandboxError(f"{self.api}: no container within {_SETUP_SECONDS:g} s")


def _listen_in_network_of(process: int) -> socket.socket:
    """Listen on loopback in the network namespace of a process.

    A thread that entered another namespace is not used for anything else.
    """
    result: list[socket.socket | OSError] = []

    def enter() -> None:
        try:
            namespace = os.open(f"/proc/{process}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace, _NEW_NETWORK) == -1:
                    raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
            finally:
                os.close(namespace)
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", GATEWAY_PORT))
            listener.listen(1024)
            listener.setblocking(False)
            result.append(listener)
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise SandboxError(
            f"network: got 'none', but process {process}'s network cannot be entered ({result[0]}); "
            "expected to be root on the daemon's machine, or network='bridge'"
        )
    return result[0]


def _is_root(user: str) -> bool:
    return user.partition(":")[0] in ("0", "root")


def _reason(message: str) -> str:
    """The reason why a command did not start, in the words of the other kinds where the daemon's are known."""
    words = {"executable file not found": "No such file or directory", "no such file": "No such file or directory"}
    words["permission denied"] = "Permission denied"
    return next((plain for found, plain in words.items() if found in message.lower()), message)


def left_in(rows: Sequence[Sequence[str]], users: Sequence[str] | None) -> list[str]:
    """The processes of a container besides the first and the command that it waits for.

    Args:
        rows: user, number, parent and command of each.
        users: of that command; ``None`` for any.
    """
    numbers = {row[1] for row in rows}
    first = next((row for row in rows if row[2] not in numbers and row[3] == " ".join(FIRST_PROCESS)), None)
    if first is None:
        return [row[3] for row in rows]
    waits = [row for row in rows if row[2] == first[1] and row[3] == _WAITS and (users is None or row[0] in users)]
    return [row[3] for row in rows if row is not first and row not in waits[:1]]


def _archive_of(name: str, data: bytes, mode: int, user: str) -> bytes:
    """A tar archive of one file."""
    owner, _, group = user.partition(":")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = len(data), mode, int(time.time())
        if owner.isdigit():
            member.uid, member.gid = int(owner), int(group) if group.isdigit() else int(owner)
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


class NumberedTail(Tail):
    """The last bytes of an output, without the first line ``MARK NUMBER``.

    A loader or a shell may write before it, as of a locale that the image does not have.
    """

    number: int | None = None

    def __init__(self, max_bytes: int, mark: str) -> None:
        super().__init__(max_bytes)
        self._line = re.compile(rb"%s (\d{1,10})\n" % re.escape(mark.encode()))
        self._before: bytes | None = b""

    def add(self, data: bytes) -> None:
        """Keep the bytes, without the line."""
        if self._before is not None:
            data = self._before + data
            found = self._line.search(data)
            if found is None and len(data) <= _BEFORE:
                self._before = data
                return
            self._before = None
            if found is not None:
                self.number, data = int(found[1]), data[: found.start()] + data[found.end() :]
        super().add(data)

    @property
    def has_begun(self) -> bool:
        """Whether the number is known, or is not looked for any more."""
        return self._before is None

    @property
    def text(self) -> str:
        """The text; what came without the line is part of it."""
        if self._before is not None:
            super().add(self._before)
            self._before = None
        return super().text


def _shell(script: str, seconds: float) -> Command:
    return Command(["sh", "-c", script], {}, seconds, "/")


class RunningContainer(Running):
    """An open sandbox of the kind ``container``."""

    listener: socket.socket | None = None

    def __init__(self, kind: ContainerSandbox, api: DockerApi, identity: str) -> None:
        super().__init__()
        self._kind, self._api, self.id = kind, api, identity
        self.abilities = kind.abilities
        self._user = kind.user or "0:0"

    async def begin(self) -> None:
        """Learn what the image says, and make the workspace and the home, which belong to the program's user."""
        kind = self._kind
        config = (await self._api.json("GET", f"/images/{kind.image}/json"))["Config"] or {}
        self._user = kind.user or config.get("User") or "0:0"
        self.workspace = kind.workdir or config.get("WorkingDir") or "/"
        home = await self._set_up('echo "$HOME"', self._user) if kind.home is None else kind.home
        self.home = home.strip() or "/"
        made = [folder for folder in (kind.workdir, kind.home) if folder is not None]
        for folder in map(shlex.quote, made):
            user = shlex.quote(self._user)
            script = f"test -d {folder} || {{ mkdir -p {folder} && chown {user} {folder} && chmod 755 {folder}; }}"
            await self._set_up(script, "0:0")

    async def _set_up(self, script: str, user: str) -> str:
        end = await self._exec(_shell(script, _SETUP_SECONDS), user)
        if end.code != 0:
            raise SandboxError(f"image {self._kind.image!r}: the workspace cannot be made: {end.stderr.strip()}")
        return end.stdout

    def url_inside(self, port: int | None = None) -> str:
        """The listener's address, or with a bridge this machine's, at which the server must listen."""
        if self.listener is not None:
            return f"http://127.0.0.1:{GATEWAY_PORT}"
        if port is None:
            raise ConfigError.of("port", port, "the server's port: network='bridge' has no listener")
        return f"http://{_HOST}:{port}"

    async def _command(self, command: Command) -> Exit:
        self._check_open()
        argv, user = command.argv, command.user or self._user
        if command.stdin:
            place = f"/tmp/.stdin-{secrets.token_hex(8)}"  # a program could be there first
            await self._put("/tmp", _archive_of(os.path.basename(place), command.stdin, 0o644, "0:0"))
            argv = ["sh", "-c", 'exec < "$0" && rm -f "$0" 2>/dev/null; exec "$@"', place, *argv]
        env = {"HOME": self.home, "TMPDIR": "/tmp"} | HOME_ENVIRONMENT | dict(self._kind.env) | dict(command.env)
        if command.user is not None and "HOME" not in command.env:
            del env["HOME"]  # the daemon sets that of the user
        if self._kind.keep_processes:
            return await self._among_others(attrs.evolve(command, argv=argv, env=env), user)
        async with self._turn:
            self._check_open()
            try:
                return await self._exec(attrs.evolve(command, argv=argv, env=env), user)
            finally:
                if not self._closed:
                    with anyio.move_on_after(_GRACE_SECONDS, shield=True):
                        await self._kill("-1")

    async def _among_others(self, command: Command, user: str) -> Exit:
        """Run a command whose group of processes is killed at its deadline, and no other process.

        Its shell writes the number of the group before the command starts, to the stream of errors, behind a mark that
        the command cannot know: a file would be in reach of the program. The deadline counts from there. Until then
        the command is not cut, because nothing could be killed, and the engine would start it nevertheless.

        Raises:
            SandboxError: the command did not start within 30 s, or is over its deadline and its shell wrote no number.
                It was killed with all processes of the container.
        """
        mark = secrets.token_hex(8)
        argv = ["sh", "-c", 'echo "$1 $$" >&2; shift; exec "$@"', "sh", mark, *command.argv]
        errors = NumberedTail(self._kind.limits.output_bytes, mark)
        identity = await self._created(attrs.evolve(command, argv=argv), user)
        over = False
        try:
            end = await self._started(identity, command, errors)
            over = not end.timed_out and not (command.stop is not None and command.stop.is_set())
        finally:
            if not over and not self._closed:
                with anyio.move_on_after(_GRACE_SECONDS, shield=True):
                    await self._kill("-1" if errors.number is None else f"-{errors.number}")
        if not over and errors.number is None:
            raise SandboxError(_UNKNOWN_GROUP.format(command.argv[0], "did not end in time"))
        return end

    async def _kill(self, whom: str) -> None:
        await self._exec(_shell(f"kill -9 {whom}", _GRACE_SECONDS), "0:0")

    async def kill_all(self) -> None:
        """Kill every process but the first; the daemon, not the container, says whether they are gone.

        A program that is root may have replaced the ``sleep`` that process 1 runs, and then lives on as that.

        Raises:
            SandboxError: one is not gone within 20 s.
        """
        self._check_open()
        # Podman runs the container's own ps, unless it is asked for columns that it knows (4.3, libpod: Container.Top).
        parts = (await self._api.json("GET", "/version")).get("Components") or ()
        is_podman = any("Podman" in str(part.get("Name")) for part in parts)
        query = {"ps_args": _COLUMNS if is_podman else f"-eo {_COLUMNS}"}
        left: list[str] = []
        with anyio.move_on_after(_GRACE_SECONDS):
            while True:
                await self._kill("-1")
                rows = (await self._api.json("GET", f"/containers/{self.id}/top", query))["Processes"]
                left = left_in(rows, _ROOT if self._kind._not_root else None)
                if not left:
                    return
        names = ", ".join(repr(line[-_SHOWN:]) for line in left[:_SHOWN_PROCESSES])
        raise SandboxError(f"{len(left)} processes are left {_GRACE_SECONDS:g} s after they were killed: {names}")

    async def _exec(self, command: Command, user: str) -> Exit:
        return await self._started(await self._created(command, user), command)

    async def _created(self, command: Command, user: str) -> str:
        """The id of a command that the engine has not started yet."""
        body = {
            "AttachStdin": False,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "Cmd": list(command.argv),
            "Env": [f"{name}={value}" for name, value in command.env.items()],
            "WorkingDir": command.cwd,
            "User": user,
        }
        created = await self._api.json("POST", f"/containers/{self.id}/exec", None, body)
        return str(created["Id"])

    async def _started(self, identity: str, command: Command, numbered: NumberedTail | None = None) -> Exit:
        """Start a command and wait for its end; with ``numbered``, its deadline counts from the number of its group."""
        tails = Tail(self._kind.limits.output_bytes), numbered or Tail(self._kind.limits.output_bytes)
        began = time.monotonic()
        try:
            frames = self._api.frames(f"/exec/{identity}/start", {"Detach": False, "Tty": False})
            async with contextlib.aclosing(frames):
                if numbered is not None:
                    with anyio.move_on_after(_START_SECONDS, shield=True) as start:
                        async for which, data in frames:
                            tails[which - 1].add(data)
                            if numbered.has_begun:
                                break
                    if start.cancelled_caught:
                        raise SandboxError(
                            _UNKNOWN_GROUP.format(command.argv[0], f"said nothing in {_START_SECONDS:g} s")
                        )
                    began = time.monotonic()
                with anyio.move_on_after(command.seconds) as scope:
                    async with stopped_by(command.stop):
                        async for which, data in frames:
                            tails[which - 1].add(data)
        except DockerError as error:
            if error.status not in (400, 500):  # so daemons report a command that cannot be started
                raise
            return Exit(127, "", f"{command.argv[0]}: {_reason(str(error))}", time.monotonic() - began)
        took = time.monotonic() - began
        truncated = tails[0].truncated or tails[1].truncated
        if scope.cancelled_caught or (command.stop is not None and command.stop.is_set()):
            return Exit(-9, tails[0].text, tails[1].text, took, scope.cancelled_caught, truncated)
        code = (await self._api.json("GET", f"/exec/{identity}/json"))["ExitCode"]
        if code in (126, 127) and _OF_RUNTIME in tails[1].text:  # so Podman reports it
            return Exit(127, "", f"{command.argv[0]}: {_reason(tails[1].text)}", took)
        code = 128 - code if code > 128 else 127 if code == 126 else code  # as a shell reports signals
        return Exit(code, tails[0].text, tails[1].text, took, False, truncated)

    async def read(self, path: str) -> bytes | None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        self._check_open()
        place = inner_path(path, self.workspace, self.home)
        max_bytes = self._kind.limits.file_bytes
        try:
            data = await self._api.send(
                Request("GET", f"/containers/{self.id}/archive", {"path": place}), max_bytes=max_bytes + (1 << 20)
            )
        except DockerError as error:
            if error.status in (400, 404):
                return None
            raise
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            first = archive.next()
            if first is None or not first.isreg():
                return None
            check_size(f"path {path!r}", first.size, self._kind.limits)
            content = archive.extractfile(first)
            return None if content is None else content.read()

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        self._check_open()
        check_size(f"path {path!r}", len(data), self._kind.limits)
        place = inner_path(path, self.workspace, self.home)
        folder, name = posixpath.split(place)
        script = f"mkdir -p {shlex.quote(folder)} && rm -f {shlex.quote(place)}"
        made = await self._exec(_shell(script, _GRACE_SECONDS), self._user)
        if made.code != 0:
            raise SandboxError(f"path: got {path!r}, which cannot be written: {made.stderr.strip()}")
        await self._put(folder, _archive_of(name, data, mode, self._user))
        if not self._user.partition(":")[0].isdigit():
            owner = f"chown {shlex.quote(self._user)} {shlex.quote(place)}"
            await self._exec(_shell(owner, _GRACE_SECONDS), "0:0")

    async def _put(self, folder: str, archive: bytes | Path) -> None:
        await self._api.send(Request("PUT", f"/containers/{self.id}/archive", {"path": folder}, archive))

    async def pack(self, path: str, archive: str | os.PathLike[str]) -> bool:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`; the daemon makes the archive.

        Podman 4.3 names root as the owner of all members.
        """
        self._check_open()
        place = inner_path(path, self.workspace, self.home)
        request = Request("GET", f"/containers/{self.id}/archive", {"path": place})
        size, limit = 0, self._kind.limits.disk_bytes
        try:
            async with (
                contextlib.aclosing(self._api.stream(request)) as chunks,
                await anyio.open_file(archive, "wb") as file,
            ):
                async for chunk in chunks:
                    size += len(chunk)
                    if size > limit:
                        raise SandboxError(f"pack {path!r}: got more than {limit:,} bytes")
                    await file.write(chunk)
        except DockerError as error:
            await anyio.Path(archive).unlink(missing_ok=True)
            if error.status in (400, 404):
                return False
            raise
        limited = f"{os.fspath(archive)}.limited"
        if await anyio.to_thread.run_sync(archives.limit_times, archive, limited):
            await anyio.Path(limited).replace(os.fspath(archive))
        return True

    async def unpack(self, archive: str | os.PathLike[str], folder: str) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`; the daemon extracts the archive."""
        self._check_open()
        place = inner_path(folder, self.workspace, self.home)
        try:
            await anyio.to_thread.run_sync(archives.check_members, archive, self._kind.limits.disk_bytes)
        except OSError as error:
            raise SandboxError(f"unpack {folder!r}: {error.strerror or error}") from error
        made = await self._exec(_shell(f"mkdir -p {shlex.quote(place)}", _GRACE_SECONDS), self._user)
        if made.code != 0:
            await self._set_up(f"mkdir -p {shlex.quote(place)}", "0:0")
        with tempfile.TemporaryDirectory(prefix="rollouts-archive-") as name:
            limited = f"{name}/limited.tar"
            is_limited = await anyio.to_thread.run_sync(archives.limit_times, archive, limited)
            await self._put(place, Path(limited if is_limited else archive))

    async def close(self) -> None:
        """Remove the container with its files."""
        if self._closed:
            return
        self._closed = True
        if self.listener is not None:
            self.listener.close()
        try:
            await self._api.json("DELETE", f"/containers/{self.id}", {"force": "1", "v": "1"})
        except DockerError as error:
            if error.status != 404:
                raise
