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

from rollouts.errors import ConfigError
from rollouts.extras import install_command
from rollouts.sandboxes.base import SandboxError
from rollouts.sandboxes.remote import Machine, RemoteSandbox
from rollouts.validators import as_texts, check

__all__ = ["E2BSandbox"]

_SCRIPT_SECONDS = 90
"""E2B's deadline of a script; ours is earlier."""


@attrs.frozen
class E2BSandbox(RemoteSandbox):
    """Virtual machines of E2B. The key is ``E2B_API_KEY``."""

    template: str = attrs.field(
        default="base",
        validator=check("a text that is not empty", lambda value: isinstance(value, str) and bool(value)),
    )
    """Name of a template; it has the programs, and decides processors and memory."""
    allow: tuple[str, ...] | None = attrs.field(
        default=None,
        kw_only=True,
        converter=lambda value: None if value is None else as_texts(value),
        validator=check("host names, IP addresses and CIDRs", lambda value: _are_hosts(value), optional=True),
    )
    """What the program may reach, among it the host of the gateway; by default the internet."""
    connection: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True, repr=False)
    """Options of ``e2b.ApiParams``, e.g. ``domain`` and ``api_key``; by default those of the environment."""

    async def _create(self) -> Machine:
        try:
            from e2b import AsyncSandbox
        except ImportError as error:
            raise ConfigError(f"E2BSandbox needs e2b: {install_command('e2b')} ({error})") from error
        network = None if self.allow is None else {"allow_out": list(self.allow), "deny_out": ["0.0.0.0/0"]}
        machine = await AsyncSandbox.create(
            self.template,
            timeout=math.ceil(self.lifetime),
            metadata={"rollouts.sandbox": "1"},
            network=network,
            **self.connection,
        )
        return _E2BMachine(machine)

    def _enforced(self) -> Mapping[str, str]:
        size = {"memory": "that of the template's machine", "disk": "that of the template's machine"}
        return size if self.allow is None else {**size, "network": f"E2B's firewall allows {', '.join(self.allow)}"}

    def _not_enforced(self) -> Mapping[str, str]:
        return {
            "processes": "no limit but the machine's memory",
            "privileges": "the template's user may become root in the machine",
            "network": "the internet",
        }


def _are_hosts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(host, str) and host and " " not in host for host in value)


class _E2BMachine:
    def __init__(self, machine: Any) -> None:
        self._machine = machine

    async def execute(self, script: str) -> str:
        from e2b import CommandExitException

        try:
            line = shlex.join(["sh", "-c", script])
            done = await self._machine.commands.run(line, cwd="/", timeout=_SCRIPT_SECONDS)
        except CommandExitException as error:
            return str(error.stdout)
        return str(done.stdout)

    async def upload(self, path: str, data: bytes) -> None:
        await self._machine.files.write(path, data, request_timeout=0)

    async def download(self, path: str, most: int) -> bytes:
        data = bytearray()
        async with await self._machine.files.read(path, format="stream") as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) > most:
                    raise SandboxError(f"path {path!r}: got more than {most:,} bytes")
        return bytes(data)

    async def delete(self) -> None:
        await self._machine.kill()
