"""The kind ``daytona``: a sandbox of Daytona for each rollout, through its SDK.

Invariant: Daytona's sandbox is deleted when ours is closed, and by Daytona after ``lifetime``. Its workspace is
``/workspace``. The program is the image's user.

It was tested with the real SDK against a strict fake of the API, never against Daytona.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import shlex
from collections.abc import Mapping
from typing import Any

import anyio
import attrs

from rollouts.errors import ConfigError
from rollouts.sandboxes.base import NON_EMPTY
from rollouts.sandboxes.remote import CloudSandbox, Machine, received, sdk

__all__ = ["DaytonaSandbox"]

_GIB = 1 << 30
_SCRIPT_SECONDS = 90
"""Daytona's deadline of a script; ours is earlier."""
_START_SECONDS = 200
"""Daytona's deadline of a start; ours is later."""

_GRACE_SECONDS = 25.0
"""Deadline of deleting what did not start."""


@attrs.frozen
class DaytonaSandbox(CloudSandbox):
    """Sandboxes of Daytona. The key is ``DAYTONA_API_KEY``."""

    snapshot: str | None = attrs.field(default=None, validator=attrs.validators.optional(NON_EMPTY))
    """Name of a snapshot; by default Daytona's own. It decides processors, memory and disk."""
    image: str | None = attrs.field(default=None, kw_only=True, validator=attrs.validators.optional(NON_EMPTY))
    """Name of a public image instead of a snapshot; memory and disk are as in ``limits``, in whole GiB."""
    connection: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True, repr=False)
    """Options of ``daytona.DaytonaConfig``, e.g. ``api_url`` and ``api_key``; by default as in the environment."""

    def __attrs_post_init__(self) -> None:
        if self.snapshot is not None and self.image is not None:
            raise ConfigError.of("DaytonaSandbox.image", self.image, "None, as there is a snapshot")

    async def _create(self) -> Machine:
        daytona = await sdk("DaytonaSandbox", "daytona", "daytona", "AsyncDaytona")
        name = f"rollouts-{secrets.token_hex(8)}"
        options: dict[str, Any] = {
            "name": name,
            "labels": {"rollouts.sandbox": "1"},
            "ttl_minutes": math.ceil(self.lifetime / 60),
            "auto_stop_interval": 0,
            "ephemeral": True,
        }
        if self._firewall() is not None:
            options["domain_allow_list"] = ",".join(self.hosts or ()) or None
            options["network_allow_list"] = ",".join(self.networks or ()) or None
            options["network_block_all"] = not self._firewall()
        if self.image is None:
            given = daytona.CreateSandboxFromSnapshotParams(snapshot=self.snapshot, **options)
        else:
            memory, disk = (math.ceil(size / _GIB) for size in (self.limits.memory_bytes, 3 * self.limits.disk_bytes))
            resources = daytona.Resources(memory=memory, disk=disk)
            given = daytona.CreateSandboxFromImageParams(image=self.image, resources=resources, **options)
        client = daytona.AsyncDaytona(daytona.DaytonaConfig(**self.connection))
        try:
            sandbox = await client.create(given, timeout=_START_SECONDS)
        except BaseException:
            with anyio.move_on_after(_GRACE_SECONDS, shield=True):
                with contextlib.suppress(daytona.DaytonaError):
                    await (await client.get(name)).delete()
                await client.close()
            raise
        return _DaytonaMachine(client, sandbox, daytona.DaytonaNotFoundError)

    def _enforced(self) -> Mapping[str, str]:
        size = "that of the machine, which is as large as the limit in whole GiB"
        sizes = {} if self.image is None else {"memory": size, "disk": f"{size}, three times"}
        return {**super()._enforced(), **sizes}


@attrs.frozen
class _DaytonaMachine:
    _client: Any
    _sandbox: Any
    _gone: type[Exception]

    async def execute(self, script: str) -> str:
        line = f"{shlex.join(['sh', '-c', script])} 2> /dev/null"  # its answer has both outputs as one
        return str((await self._sandbox.process.exec(line, cwd="/", timeout=_SCRIPT_SECONDS)).result)

    async def upload(self, path: str, data: bytes) -> None:
        await self._sandbox.fs.upload_file(data, path)

    async def download(self, path: str, max_bytes: int) -> bytes:
        async with contextlib.aclosing(await self._sandbox.fs.download_file_stream(path)) as chunks:
            return await received(chunks, path, max_bytes)

    async def delete(self) -> None:
        try:
            with contextlib.suppress(self._gone):
                await self._sandbox.delete()
        finally:
            await self._client.close()
