"""The kind ``image``: Linux namespaces over an unpacked image, without a daemon.

Invariant: the program sees the image's files under a writable layer in memory, its own processes, and a loopback
interface where only our listener answers, or this machine's network. Its users, root too, are users without rights
outside. The mounts are made in the sandbox's mount namespace, so that all of it ends with this process: no folder,
mount or process is left, however it ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

import anyio
import attrs

from rollouts.base.validators import check, integer, number
from rollouts.errors import ConfigError
from rollouts.sandboxes.base import BOOLEAN, GATEWAY_PORT, Ability, SandboxError, SandboxLimits
from rollouts.sandboxes.containment import Containment
from rollouts.sandboxes.control_groups import make_groups
from rollouts.sandboxes.held import RunningHeld, open_held
from rollouts.sandboxes.image_root import SHARED_BYTES
from rollouts.sandboxes.images import Image, load_image

__all__ = ["ImageSandbox"]

_SPARE_BYTES = 64 << 20
"""Memory that is left for processes where the writable layer is full: else no command of ours could run in it."""


def _as_image(value: Any) -> Any:
    return value if isinstance(value, Image) else load_image(value)


def _check_user(instance: ImageSandbox, field: Any, value: str | None) -> None:
    user = instance.image.user if value is None else value
    if not isinstance(user, str) or not user:
        raise ConfigError.of("ImageSandbox.user", value, "a user of the image, or None")
    if os.geteuid() and user.partition(":")[0] not in ("root", "0"):
        expected = "root: only one user can be mapped, because this process is not root"
        raise ConfigError.of("ImageSandbox.user", user, expected)


def _check_memory(instance: ImageSandbox, field: Any, value: int | None) -> None:
    integer(1, optional=True)(instance, field, value)
    least = instance.limits.disk_bytes + SHARED_BYTES + _SPARE_BYTES
    if value is not None and value < least:
        expected = f"at least {least:,}: limits.disk_bytes={instance.limits.disk_bytes:,}, /dev/shm and 64 MiB more"
        raise ConfigError.of("ImageSandbox.memory_bytes", value, expected)


@attrs.frozen
class ImageSandbox:
    """Linux namespaces over an unpacked image."""

    image: Image = attrs.field(converter=_as_image)
    """An :class:`~rollouts.sandboxes.images.Image`, or the folder of one."""
    workdir: str | None = attrs.field(
        default=None, validator=check("an absolute path, or None", lambda value: value is None or value[:1] == "/")
    )
    """The workspace; by default the image's. It is made where it is missing."""
    env: Mapping[str, str] = attrs.field(factory=dict, converter=dict)
    """Variables of every command, in addition to the image's."""
    user: str | None = attrs.field(default=None, validator=_check_user)
    """The user of the program and of commands: a name, a number, or ``user:group``; by default the image's."""
    network: Literal["none", "host"] = attrs.field(
        default="none", validator=check('"none" or "host"', lambda value: value in ("none", "host"))
    )
    """``"none"``: loopback only, in which our listener answers. ``"host"``: the network of this machine."""
    keep_processes: bool = attrs.field(default=False, validator=BOOLEAN)
    """Whether commands run at once, and what one leaves running lives on in the next."""
    cpus: float | None = attrs.field(default=None, validator=number("a number", above=0, optional=True))
    """Processors of all processes together; needs control groups that can be written."""
    limits: SandboxLimits = attrs.field(factory=SandboxLimits)
    memory_bytes: int | None = attrs.field(default=None, validator=_check_memory)
    """Memory of all processes and of the writable layer together; needs control groups that can be written."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """``users`` for root, ``keep_processes`` where it is set."""
        has: dict[Ability, bool] = {"users": os.geteuid() == 0, "keep_processes": self.keep_processes}
        return frozenset(name for name, there in has.items() if there)

    def containment(self) -> Containment:
        """The limits that the namespaces enforce; :meth:`open` raises where the machine cannot make namespaces."""
        how = {
            "seconds": "everything is killed at the deadline",
            "memory": "RLIMIT_DATA, of each process",
            "processes": "RLIMIT_NPROC in a user namespace, of each user",
            "file_size": "RLIMIT_FSIZE",
            "disk": "a layer in memory, of that size",
            "output": "the last bytes are kept",
            "writing": "a separate file system",
            "reading": "the image",
            "signals": "a process namespace",
            "survivors": "a process namespace",
            "privileges": "users without rights outside, with the capabilities of a container in their namespace",
            "environment": "not passed on",
            "descriptors": "closed except the three streams",
        }
        reasons = {"cpu_seconds": "only wall time is limited"}
        if self.memory_bytes is not None:
            how["memory"] = "a control group"
        if self.cpus is not None:
            reasons["cpu_seconds"] = f"wall time is limited, and {self.cpus:g} processors"
        if self.network == "none":
            how["network"] = "a network namespace, in which only our listener answers"
        else:
            reasons["network"] = "the network of this machine, its loopback interface too"
        return Containment(how, reasons, ("namespaces", "user"))

    async def open(self) -> RunningHeld:
        """Make the namespaces, the writable layer and the listener."""
        if sys.platform != "linux":
            raise SandboxError(f"image: got {sys.platform}; expected Linux")
        alone = self.network == "none"
        files = {"/etc/hostname": "sandbox\n", "/etc/hosts": "127.0.0.1 localhost sandbox\n"}
        if not alone:
            files["/etc/resolv.conf"] = await anyio.Path("/etc/resolv.conf").read_text(errors="replace")
        settings = {
            **attrs.asdict(self.limits),
            "port": GATEWAY_PORT if alone else None,
            "user": self.user or self.image.user,
            "home": "",
            "cwd": self.workdir or self.image.workdir,
            "readable": (),
            "files": files,
            "image": {"roots": self.image.roots},
            "groups": make_groups(self.memory_bytes, self.cpus),
        }
        env = {"LANG": "C.UTF-8", "TZ": "UTC", "TMPDIR": "/tmp"} | self.image.variables | dict(self.env)
        running = RunningHeld("image", settings, env, self.limits, self.abilities)
        await open_held(running)
        return running
