"""The kind ``modal``: a sandbox of Modal (gVisor) for each rollout, through its SDK.

Invariant: Modal's sandbox is deleted when ours is closed, and by Modal after ``lifetime``. Its workspace is
``/workspace``. The program is the image's user.

It was tested with the real SDK against a strict fake of the API, never against Modal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import anyio
import attrs

from rollouts.sandboxes.base import FIRST_PROCESS, NON_EMPTY, SandboxError
from rollouts.sandboxes.remote import CloudSandbox, Machine, sdk

__all__ = ["ModalSandbox"]

_MIB = 1 << 20
_RESERVED_MIB = 128
"""Memory that is reserved, and paid for, also when it is not used: Modal's default."""
_SCRIPT_SECONDS = 90
"""Modal's deadline of a script; ours is earlier."""
_FILE_SECONDS = 600
"""Modal's deadline of a file; ours is earlier."""
_GRACE_SECONDS = 25.0
"""Deadline of deleting what did not start."""


@attrs.frozen
class ModalSandbox(CloudSandbox):
    """Sandboxes of Modal. The key is ``MODAL_TOKEN_ID`` with ``MODAL_TOKEN_SECRET``, or that of ``~/.modal.toml``."""

    image: str = attrs.field(default="python:3.12", validator=NON_EMPTY)
    """Name of a public image that has Python, or the id (``im-…``) of an image that Modal has built."""
    app: str = attrs.field(default="rollouts", kw_only=True, validator=NON_EMPTY)
    """Name of the app to which the sandboxes belong; it is created if it does not exist."""

    async def _create(self) -> Machine:
        modal = await sdk("ModalSandbox", "modal", "modal", "App", "Image", "Sandbox")
        built = self.image.startswith("im-")
        image = modal.Image.from_id(self.image) if built else modal.Image.from_registry(self.image)
        memory = math.ceil(self.limits.memory_bytes / _MIB)
        network: dict[str, Any] = {"outbound_domain_allowlist": self.hosts, "outbound_cidr_allowlist": self.networks}
        sandbox = await modal.Sandbox.create.aio(
            *FIRST_PROCESS,
            app=await modal.App.lookup.aio(self.app, create_if_missing=True),
            image=image,
            memory=(min(memory, _RESERVED_MIB), memory),
            timeout=math.ceil(self.lifetime),
            tags={"rollouts.sandbox": "1"},
            **({"block_network": True} if self._firewall() == () else network),
        )
        machine = _ModalMachine(sandbox, modal.stream_type.StreamType.DEVNULL, modal.exception.NotFoundError)
        try:
            await machine.execute("")  # a sandbox that is created has not started yet
        except BaseException:
            with anyio.move_on_after(_GRACE_SECONDS, shield=True):
                await machine.delete()
            raise
        return machine

    def _enforced(self) -> Mapping[str, str]:
        return {**super()._enforced(), "memory": "the service's limit, in whole MiB"}


@attrs.frozen
class _ModalMachine:
    _sandbox: Any
    _discarded: Any
    _gone: type[Exception]

    async def execute(self, script: str) -> str:
        return (await self._exec(_SCRIPT_SECONDS, "sh", "-c", script)).decode(errors="replace")

    async def upload(self, path: str, data: bytes) -> None:
        written = await self._exec(_FILE_SECONDS, "sh", "-c", 'cat > "$1" && wc -c < "$1"', "sh", path, stdin=data)
        if written.strip() != str(len(data)).encode():
            raise SandboxError(f"path {path!r}: got {written!r}; expected the size of what was sent, {len(data):,}")

    async def download(self, path: str, max_bytes: int) -> bytes:
        return await self._exec(_FILE_SECONDS, "head", "-c", str(max_bytes + 1), path)

    async def delete(self) -> None:
        try:
            await self._sandbox.terminate.aio()
        except self._gone:
            pass
        finally:
            await self._sandbox.detach.aio()

    async def _exec(self, seconds: int, *argv: str, stdin: bytes | None = None) -> bytes:
        """Run a command; return its standard output."""
        process = await self._sandbox.exec.aio(*argv, workdir="/", timeout=seconds, text=False, stderr=self._discarded)
        if stdin is not None:
            for start in range(0, len(stdin), _MIB):
                process.stdin.write(stdin[start : start + _MIB])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
        return bytes(await process.stdout.read.aio())
