"""The kind ``e2b``: a virtual machine of E2B (Firecracker) for each rollout, through its SDK.

Invariant: the machine is deleted when the sandbox is closed, and by E2B after ``lifetime``. Its workspace is
``/workspace``. The program is the template's user, who may become root with ``sudo`` in E2B's templates.

It was tested with the real SDK against a strict fake of the API, never against E2B.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

import attrs

from rollouts.sandboxes.base import NON_EMPTY
from rollouts.sandboxes.remote import CloudSandbox, Machine, received, sdk

__all__ = ["E2BSandbox"]

_SCRIPT_SECONDS = 90
"""E2B's deadline of a script; ours is earlier."""


@attrs.frozen
class E2BSandbox(CloudSandbox):
    """Virtual machines of E2B. The key is ``E2B_API_KEY``."""

    template: str = attrs.field(default="base", validator=NON_EMPTY)
    """Name of a template; it has the programs, and decides processors and memory."""
    connection: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True, repr=False)
    """Options of ``e2b.ApiParams``, e.g. ``domain`` and ``api_key``; by default as in the environment."""

    async def _create(self) -> Machine:
        e2b = await sdk("E2BSandbox", "e2b", "e2b", "AsyncSandbox")
        allowed = self._firewall()
        network = None if allowed is None else {"allow_out": list(allowed), "deny_out": ["0.0.0.0/0"]}
        machine = await e2b.AsyncSandbox.create(
            self.template,
            timeout=math.ceil(self.lifetime),
            metadata={"rollouts.sandbox": "1"},
            network=network,
            **self.connection,
        )
        return _E2BMachine(machine, e2b.CommandExitException)


@attrs.frozen
class _E2BMachine:
    _machine: Any
    _exit: type[Exception]

    async def execute(self, script: str) -> str:
        line = shlex.join(["sh", "-c", script])
        try:
            done = await self._machine.commands.run(line, cwd="/", timeout=_SCRIPT_SECONDS)
        except self._exit as error:  # its exit code is not 0
            done = error
        return str(done.stdout)

    async def upload(self, path: str, data: bytes) -> None:
        await self._machine.files.write(path, data, request_timeout=0)

    async def download(self, path: str, max_bytes: int) -> bytes:
        async with await self._machine.files.read(path, format="stream") as chunks:
            return await received(chunks, path, max_bytes)

    async def delete(self) -> None:
        await self._machine.kill()
