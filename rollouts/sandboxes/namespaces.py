"""The kind ``namespaces``: Linux namespaces for network, processes, files and users, without a daemon.

Invariant: the program sees the system folders and ``readable``, all read-only, an empty ``/workspace``, ``/tmp`` and
home in memory, its own processes, and a loopback interface where only our listener answers. The listener is made
inside and its descriptor is passed out, so that a server of this process answers in the sandbox. All of it ends with
this process.

bubblewrap makes the namespaces where it is installed, except for root: bubblewrap would leave the program as root
outside, whose processes no limit counts. The holder does so otherwise, and maps the program to a user without rights.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from rollouts.base.validators import as_texts, is_int
from rollouts.errors import ConfigError
from rollouts.sandboxes import filesystem
from rollouts.sandboxes.base import BOOLEAN, GATEWAY_PORT, HOME_ENVIRONMENT, Ability, SandboxError, SandboxLimits
from rollouts.sandboxes.containment import Containment
from rollouts.sandboxes.held import RunningHeld, interpreter, open_held

__all__ = ["NamespaceSandbox"]

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
    keep_processes: bool = attrs.field(default=False, validator=BOOLEAN)
    """Whether commands run at once, and what one leaves running lives on in the next."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """``keep_processes`` where it is set; all commands run as one user."""
        return frozenset({"keep_processes"} if self.keep_processes else ())

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

    async def open(self) -> RunningHeld:
        """Make the namespaces, the files and the listener."""
        if sys.platform != "linux":
            raise SandboxError(f"namespaces: got {sys.platform}; expected Linux")
        program = self._bubblewrap
        if self.bubblewrap and program is None:
            raise SandboxError("bubblewrap: got True, but bwrap is not installed; expected it in PATH")
        python, prefixes = interpreter()
        readable = [*_PUBLIC, python, *prefixes, *self.readable]
        settings = {
            **attrs.asdict(self.limits),
            "port": self.port,
            "user": None,
            "home": _HOME,
            "cwd": _WORKSPACE,
            "readable": readable,
            "files": _FILES,
            "image": None,
            "groups": [],
        }
        env = {"PATH": _PATH, "HOME": _HOME, "TMPDIR": "/tmp"} | HOME_ENVIRONMENT
        running = RunningHeld("namespaces", settings, env, self.limits, self.abilities)
        if program is None:
            await open_held(running)
        else:
            files = [_memory_file(content) for content in _FILES.values()]
            await open_held(running, _in_bubblewrap(program, self.limits.disk_bytes, readable, files), files)
        return running


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
