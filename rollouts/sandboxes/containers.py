"""The kind ``container``: one container of Docker or Podman for each rollout, through the daemon's HTTP API.

Invariant: the container is removed with its files when the sandbox is closed. Its workspace is ``/workspace``. With
``network="none"`` it has a loopback interface only; the listener is made in its network namespace, for which this
process must be root on the daemon's machine. With ``network="bridge"`` the program reaches this machine and the
internet.

The image needs ``sh``. No image is pulled. It was tested against a strict fake of the API and runs its tests against a
real daemon where there is one.
"""

from __future__ import annotations

import ctypes
import io
import os
import posixpath
import shlex
import socket
import tarfile
import threading
import time
from typing import Any, Literal

import anyio
import anyio.to_thread
import attrs

from rollouts.base.validators import check
from rollouts.errors import ConfigError
from rollouts.sandboxes.base import (
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
from rollouts.sandboxes.docker_api import DockerApi, DockerError
from rollouts.sandboxes.running import Running, stopped_by

__all__ = ["ContainerSandbox"]

_WORKSPACE, _HOME = "/workspace", "/home/agent"
_SETUP_SECONDS, _GRACE_SECONDS = 60.0, 20.0
_NEW_NETWORK = 0x40000000
_HOST = "host.docker.internal"
_DOCKER = "/var/run/docker.sock"


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
    user: str = attrs.field(default="1000:1000", validator=NON_EMPTY)
    """User and group of the program, as ``--user`` of ``docker run``."""
    limits: SandboxLimits = attrs.field(factory=SandboxLimits)

    @property
    def abilities(self) -> frozenset[Ability]:
        """None beyond the protocol's minimum."""
        return frozenset()

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
        if self.user.partition(":")[0] in ("0", "root"):
            reasons["privileges"] = "the program is root in the container, without capabilities"
        else:
            enforced["privileges"] = "no capability, not root"
        return Containment(enforced, reasons, ())

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
                "SecurityOpt": ["no-new-privileges"],
                "Ulimits": [
                    {"Name": "fsize", "Soft": self.limits.file_bytes, "Hard": self.limits.file_bytes},
                    {"Name": "core", "Soft": 0, "Hard": 0},
                ],
            },
        }
        if self.network == "bridge":
            body["HostConfig"]["ExtraHosts"] = [f"{_HOST}:host-gateway"]
        with anyio.move_on_after(_SETUP_SECONDS):
            with anyio.CancelScope(shield=True):  # a container whose creation is cut would have no owner
                created = await api.json("POST", "/containers/create", None, body)
            running = RunningContainer(self, api, created["Id"])
            try:
                await api.json("POST", f"/containers/{running.id}/start")
                await running.make_folders()
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


def _shell(script: str, seconds: float) -> Command:
    return Command(["sh", "-c", script], {}, seconds, "/")


class RunningContainer(Running):
    """An open sandbox of the kind ``container``."""

    workspace, home = _WORKSPACE, _HOME
    listener: socket.socket | None = None

    def __init__(self, kind: ContainerSandbox, api: DockerApi, identity: str) -> None:
        super().__init__()
        self._kind, self._api, self.id = kind, api, identity

    async def make_folders(self) -> None:
        """Make the workspace and the home, which belong to the program's user."""
        folders, user = f"{_WORKSPACE} {_HOME}", shlex.quote(self._kind.user)
        script = f"mkdir -p {folders} && chown {user} {folders} && chmod 755 {folders}"
        end = await self._exec(_shell(script, _SETUP_SECONDS), "0:0")
        if end.code != 0:
            raise SandboxError(f"image {self._kind.image!r}: the workspace cannot be made: {end.stderr.strip()}")

    def url_inside(self, port: int | None = None) -> str:
        """The listener's address, or with a bridge this machine's, at which the server must listen."""
        if self.listener is not None:
            return f"http://127.0.0.1:{GATEWAY_PORT}"
        if port is None:
            raise ConfigError.of("port", port, "the server's port: network='bridge' has no listener")
        return f"http://{_HOST}:{port}"

    async def _command(self, command: Command) -> Exit:
        argv = command.argv
        if command.stdin:
            await self.write("/tmp/.stdin", command.stdin)
            argv = ["sh", "-c", 'exec "$@" < /tmp/.stdin', "sh", *argv]
        env = {"HOME": _HOME, "TMPDIR": "/tmp"} | HOME_ENVIRONMENT | dict(command.env)
        async with self._turn:
            self._check_open()
            try:
                return await self._exec(attrs.evolve(command, argv=argv, env=env), self._kind.user)
            finally:
                if not self._closed:
                    with anyio.move_on_after(_GRACE_SECONDS, shield=True):
                        await self._exec(_shell("kill -9 -1", _GRACE_SECONDS), self._kind.user)

    async def _exec(self, command: Command, user: str) -> Exit:
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
        tails = Tail(self._kind.limits.output_bytes), Tail(self._kind.limits.output_bytes)
        created = await self._api.json("POST", f"/containers/{self.id}/exec", None, body)
        began = time.monotonic()
        with anyio.move_on_after(command.seconds) as scope:
            try:
                start = {"Detach": False, "Tty": False}
                async with stopped_by(command.stop):
                    async for which, data in self._api.frames(f"/exec/{created['Id']}/start", start):
                        tails[which - 1].add(data)
            except DockerError as error:
                if error.status not in (400, 500):  # so daemons report a command that cannot be started
                    raise
                return Exit(127, "", str(error), time.monotonic() - began)
        took = time.monotonic() - began
        truncated = tails[0].truncated or tails[1].truncated
        if scope.cancelled_caught or (command.stop is not None and command.stop.is_set()):
            return Exit(-9, tails[0].text, tails[1].text, took, scope.cancelled_caught, truncated)
        code = (await self._api.json("GET", f"/exec/{created['Id']}/json"))["ExitCode"]
        code = 128 - code if code > 128 else 127 if code == 126 else code  # as a shell reports signals
        return Exit(code, tails[0].text, tails[1].text, took, False, truncated)

    async def read(self, path: str) -> bytes | None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        self._check_open()
        place = inner_path(path, _WORKSPACE, _HOME)
        max_bytes = self._kind.limits.file_bytes
        try:
            data = await self._api.send(
                "GET", f"/containers/{self.id}/archive", {"path": place}, max_bytes=max_bytes + (1 << 20)
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
        place = inner_path(path, _WORKSPACE, _HOME)
        folder, name = posixpath.split(place)
        owner, _, group = self._kind.user.partition(":")
        script = f"mkdir -p {shlex.quote(folder)} && rm -f {shlex.quote(place)}"
        made = await self._exec(_shell(script, _GRACE_SECONDS), self._kind.user)
        if made.code != 0:
            raise SandboxError(f"path: got {path!r}, which cannot be written: {made.stderr.strip()}")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(data), mode, int(time.time())
            if owner.isdigit():
                member.uid, member.gid = int(owner), int(group) if group.isdigit() else int(owner)
            archive.addfile(member, io.BytesIO(data))
        await self._api.send("PUT", f"/containers/{self.id}/archive", {"path": folder}, buffer.getvalue())

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
