"""Machines in place of a service's: a folder of this machine, seen through bubblewrap.

A command sees its own ``/``, with the programs of this machine, and this machine's processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import attrs
from anyio.abc import ByteReceiveStream

from rollouts.sandboxes.remote import Machine, RemoteSandbox

__all__ = ["Folder", "FolderSandbox", "new_folder"]


@attrs.define(eq=False)
class Folder:
    """A machine as a folder."""

    path: Path
    deleted: bool = False

    def line(self, argv: Sequence[str]) -> list[str]:
        """The command that runs another one in the folder."""
        line = ["bwrap", "--bind", str(self.path), "/", "--ro-bind", "/usr", "/usr", "--ro-bind", "/proc", "/proc"]
        return [*line, "--dev", "/dev", "--chdir", "/", "--", *argv]

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, bytes]:
        """Run a command; return its exit code and outputs."""
        variables = {"PATH": "/usr/bin:/bin", **(env or {})}
        with anyio.CancelScope(shield=True):  # a process that is cancelled while it starts keeps its pipes open
            process = await anyio.open_process(self.line(argv), env=variables)
        outputs = {1: bytearray(), 2: bytearray()}

        async def read(number: int, stream: ByteReceiveStream) -> None:
            async for chunk in stream:
                outputs[number] += chunk

        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        async with process, anyio.create_task_group() as tasks:
            tasks.start_soon(read, 1, process.stdout)
            tasks.start_soon(read, 2, process.stderr)
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await process.stdin.send(stdin)
            await process.stdin.aclose()
            code = await process.wait()
        return (128 - code if code < 0 else code), bytes(outputs[1]), bytes(outputs[2])

    def place(self, path: str) -> Path:
        """The file of a path inside."""
        return self.path / path.lstrip("/")

    def delete(self) -> None:
        """Kill what runs in the folder, and remove it."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.path.realpath(f"/proc/{pid}/root") == str(self.path):
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:
                continue
        shutil.rmtree(self.path, ignore_errors=True)
        self.deleted = True


def new_folder() -> Folder:
    """An empty machine, without a workspace."""
    path = Path(tempfile.mkdtemp(prefix="rollouts-machine-"))
    for name in ("tmp", "home", "etc"):
        (path / name).mkdir()
    for link in filter(os.path.islink, ("/bin", "/lib", "/lib64", "/sbin")):
        (path / link[1:]).symlink_to(os.readlink(link))
    return Folder(path)


@attrs.define
class _FolderMachine:
    folder: Folder
    lost: list[str]
    scripts: list[str]

    async def execute(self, script: str) -> str:
        self.scripts.append(script)
        _, out, _ = await self.folder.run(["sh", "-c", script])
        if self.lost:
            raise ConnectionError(self.lost.pop())
        return out.decode()

    async def upload(self, path: str, data: bytes) -> None:
        self.folder.place(path).write_bytes(data)

    async def download(self, path: str, max_bytes: int) -> bytes:
        return self.folder.place(path).read_bytes()

    async def delete(self) -> None:
        self.folder.delete()


@attrs.frozen
class FolderSandbox(RemoteSandbox):
    """A remote kind without a service."""

    lost: list[str] = attrs.field(factory=list)
    """Reasons why the next answers are lost on their way, the last first."""
    scripts: list[str] = attrs.field(factory=list)
    """The executed scripts."""
    folders: list[Folder] = attrs.field(factory=list)
    """The machines."""

    async def _create(self) -> Machine:
        self.folders.append(new_folder())
        return _FolderMachine(self.folders[-1], self.lost, self.scripts)

    def _enforced(self) -> Mapping[str, str]:
        return {}

    def _not_enforced(self) -> Mapping[str, str]:
        return dict.fromkeys(("memory", "processes", "disk", "network", "privileges"), "a folder")
