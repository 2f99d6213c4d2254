"""Linux system calls that the standard library lacks: namespaces, mounts, capabilities, Landlock.

Invariant: a failed system call raises ``OSError`` with the call's name; no failure is ignored. It uses the standard
library only, like everything in this folder except the launcher. It does not know what a caller uses it for.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
import sys
from collections.abc import Collection, Iterable

__all__ = [
    "CONTAINER_CAPABILITIES",
    "MACHINES",
    "NAMESPACES",
    "NEW_NETWORK",
    "Landlock",
    "become_subreaper",
    "bind_read_only",
    "die_with_parent",
    "drop_capabilities",
    "hide_from_tracers",
    "keep_capabilities",
    "landlock_abi",
    "loopback_up",
    "mapped_tree",
    "mount",
    "mount_tree",
    "no_new_privileges",
    "pivot_root",
    "read_only",
    "set_hostname",
    "unmount",
    "unshare",
]

MACHINES = {"x86_64": 0, "aarch64": 1}
"""Machines with known syscall numbers, and their column in the tables of numbers."""

NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS."""
NEW_NETWORK = 0x40000000

CONTAINER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 27, 29, 31)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT, MKNOD, AUDIT_WRITE,
SETFCAP: what Docker leaves to root of a container (moby 27, oci/caps/defaults.go)."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_AT_RECURSIVE, _AT_EMPTY_PATH, _MNT_DETACH = 0x8000, 0x1000, 2
_MOUNT_ATTR_IDMAP = 0x00100000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SIGKILL = 9
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _number(*numbers: int) -> int:
    column = MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if column is None:
        raise OSError(f"syscall numbers are not known on {sys.platform} {platform.machine()}")
    return numbers[column]


def _done(name: str, result: int) -> int:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _syscall(name: str, number: int, *arguments: int | bytes | None) -> int:
    converted = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in arguments]
    return _done(name, _libc.syscall(ctypes.c_long(number), *converted))


def _prctl(name: str, option: int, value: int = 0) -> None:
    _done(name, _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


# -- processes --------------------------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    _done("unshare", _libc.unshare(flags))


def become_subreaper() -> None:
    """Make orphaned descendants our children, so that they can be found."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Request SIGKILL when the parent ends. A change of user resets this, so call it afterwards."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, _SIGKILL)


def hide_from_tracers() -> None:
    """Deny other processes of the same user to trace this process or read its memory."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0)


def no_new_privileges() -> None:
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities(user: int, group: int) -> None:
    """Become ``user`` and drop all capabilities irrevocably."""
    for capability in range(64):
        try:
            _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
        except OSError:  # unknown to this kernel, or not permitted
            break
    if os.getuid() != user:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3, two words of each set
    _syscall("capset", _number(126, 91), header, nothing)


def keep_capabilities(kept: Collection[int]) -> None:
    """Drop all capabilities but these, of this process and of every program that it starts."""
    for capability in range(64):
        if capability not in kept:
            try:
                _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
            except OSError:  # unknown to this kernel
                break
    bits = sum(1 << capability for capability in kept)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    header = struct.pack("=Ii", 0x20080522, 0)
    sets = struct.pack("=IIIIII", low, low, 0, high, high, 0)  # effective, permitted, inheritable, in two words
    _syscall("capset", _number(126, 91), header, sets)


def set_hostname(name: bytes) -> None:
    _done("sethostname", _libc.sethostname(name, len(name)))


def loopback_up() -> None:
    """Bring up the loopback interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = bytearray(struct.pack("16sH14x", b"lo", 0))
        fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack_from("H", request, 16)[0]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


# -- mounts -----------------------------------------------------------------------------------------------------------


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    encoded = None if kind is None else kind.encode()
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), encoded, ctypes.c_ulong(flags), options.encode() or None
    )
    _done(f"mount {target}", result)


def unmount(target: str) -> None:
    _done(f"umount {target}", _libc.umount2(os.fsencode(target), _MNT_DETACH))


def pivot_root(root: str, old: str) -> None:
    _syscall("pivot_root", _number(155, 41), os.fsencode(root), os.fsencode(old))


def read_only(target: str, *, recursive: bool, devices: bool = False) -> None:
    """Make a mount read-only, with ``recursive`` also the mounts below it (Linux 5.12)."""
    attributes = MS_RDONLY | MS_NOSUID | (0 if devices else MS_NODEV)
    argument = struct.pack("=QQQQ", attributes, 0, 0, 0)
    _syscall(
        f"mount_setattr {target}",
        _number(442, 442),
        -100,  # AT_FDCWD
        os.fsencode(target),
        _AT_RECURSIVE if recursive else 0,
        argument,
        len(argument),
    )


def mapped_tree(path: str, users: int | None) -> int:
    """Copy the mount of a folder; return its descriptor.

    Args:
        path: the folder.
        users: the descriptor of a user namespace: the owners of its files are those of the namespace with the same
            numbers (Linux 5.12, and 5.19 below an overlay). ``None`` leaves them.
    """
    flags = 1 | os.O_CLOEXEC  # OPEN_TREE_CLONE
    tree = _syscall(f"open_tree {path}", _number(428, 428), -100, os.fsencode(path), flags)
    if users is not None:
        argument = struct.pack("=QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, users)
        _syscall(f"mount_setattr {path}", _number(442, 442), tree, b"", _AT_EMPTY_PATH, argument, len(argument))
    return tree


def mount_tree(tree: int, target: str) -> None:
    """Mount a copy of :func:`mapped_tree`."""
    _syscall(f"move_mount {target}", _number(429, 429), tree, b"", -100, os.fsencode(target), 4)  # F_EMPTY_PATH


def bind_read_only(source: str, target: str, *, devices: bool = False) -> None:
    """Bind-mount a file or folder; a device keeps its access rights."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if not devices:
        read_only(target, recursive=True)


# -- Landlock ---------------------------------------------------------------------------------------------------------

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_READ, _FILE = _EXECUTE | _READ_FILE | _READ_DIR, _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | 1 << 15
_RIGHTS = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 4: 1 << 15, 5: 1 << 16}
"""By version: the bit after its last file access right."""


def landlock_abi() -> int:
    """The Landlock version of this kernel; 0 without Landlock."""
    try:
        return _syscall("landlock_create_ruleset", _number(444, 444), 0, 0, 1)
    except OSError:
        return 0


class Landlock:
    """File access rules for this process and its children; everything not listed is denied."""

    def __init__(self) -> None:
        abi = landlock_abi()
        self._all = _RIGHTS[min(abi, 5)] - 1
        scopes = 3 if abi >= 6 else 0  # abstract sockets and signals
        attributes = struct.pack("=QQQ", self._all, 0, scopes)[: 24 if abi >= 6 else 8]
        self._rules = _syscall("landlock_create_ruleset", _number(444, 444), attributes, len(attributes), 0)

    def allow(self, paths: Iterable[str], *, write: bool) -> None:
        """Allow reading at or below ``paths``, with ``write`` every access; paths that do not exist are skipped."""
        self._allow(paths, self._all if write else _READ)

    def allow_names(self, paths: Iterable[str]) -> None:
        """Allow listing the folders at or below ``paths``, without their files."""
        self._allow(filter(os.path.isdir, paths), _READ_DIR)

    def _allow(self, paths: Iterable[str], granted: int) -> None:
        for path in paths:
            if not os.path.exists(path):
                continue
            descriptor = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
            rights = granted
            rights &= self._all if os.path.isdir(path) else _FILE
            rule = struct.pack("=Qi", rights & self._all, descriptor)
            _syscall("landlock_add_rule", _number(445, 445), self._rules, 1, rule, 0)
            os.close(descriptor)

    def enforce(self) -> None:
        """Enforce the rules from now on. Requires :func:`no_new_privileges`."""
        _syscall("landlock_restrict_self", _number(446, 446), self._rules, 0)
        os.close(self._rules)
