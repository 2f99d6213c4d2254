"""The root folder of a mount namespace: what a contained process sees of the machine's files.

Invariant: everything below the new root is read-only except ``/tmp`` and, where asked for, ``/workspace`` and
``/home/agent``, which are in memory and of limited size. It uses the standard library only, and is
called in a new mount namespace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rollouts.sandboxes import kernel

__all__ = ["DEVICES", "SYSTEM", "SYSTEM_FILES", "build_root"]

SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/nix/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_MODES = {"/tmp": "1777", "/workspace": "755", "/home/agent": "755"}


def build_root(
    folder: str,
    *,
    disk_bytes: int,
    readable: Sequence[str],
    hidden: Sequence[str] = (),
    paths: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    workspace: bool = False,
) -> None:
    """Build the root: read-only bind mounts of readable paths, devices, and an in-memory ``/tmp`` of limited size.

    Args:
        folder: a folder to mount the root on.
        disk_bytes: size of each of them.
        readable: files and folders to show in addition to the system's.
        hidden: folders to show empty.
        paths: folders to show although they lie below a hidden one.
        files: the content of further files, by path.
        workspace: also make ``/workspace`` and ``/home/agent``, and ``/proc``, which needs a process namespace.
    """
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    folders = [path for path in SYSTEM if path not in links]
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    limits = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", folder, "tmpfs", limits, "size=1m,mode=755")
    os.mkdir(f"{folder}/old")
    kernel.pivot_root(folder, f"{folder}/old")
    os.chdir("/")
    inodes = max(256, disk_bytes // 4096)
    for path in _MODES if workspace else ("/tmp",):
        os.makedirs(path, exist_ok=True)
        kernel.mount("tmpfs", path, "tmpfs", limits, f"size={disk_bytes},nr_inodes={inodes},mode={_MODES[path]}")
    if workspace:
        os.mkdir("/proc")
        kernel.mount("proc", "/proc", "proc", limits | kernel.MS_NOEXEC)
    hidden = [path for path in hidden if os.path.isdir(f"/old{path}")]

    def bind(paths: Sequence[str]) -> None:
        for path in paths:
            if os.path.exists(f"/old{path}") and not _is_mounted(path):
                kernel.bind_read_only(f"/old{path}", _mount_point(path))

    bind([*folders, *SYSTEM_FILES, *readable])
    for path in hidden:
        if os.path.isdir(path):
            kernel.mount("tmpfs", path, "tmpfs", limits, "size=1m,mode=755")
    bind(paths)  # those below a hidden folder
    for path in hidden:
        if os.path.isdir(path):
            kernel.read_only(path, recursive=False)
    for path, target in links.items():
        os.symlink(target, path)
    for path in DEVICES:
        kernel.bind_read_only(f"/old{path}", _mount_point(path), devices=True)
    os.symlink("/tmp", "/dev/shm")
    if workspace:
        for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
            os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
        os.mkdir("/dev/pts")
        kernel.mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID, "newinstance,ptmxmode=0666,mode=620")
        os.symlink("pts/ptmx", "/dev/ptmx")
    for path, text in (files or {}).items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
    kernel.unmount("/old")
    os.rmdir("/old")
    kernel.read_only("/", recursive=False, devices=True)


def _is_mounted(path: str) -> bool:
    """Whether an earlier bind mount contains the path; an empty mount point does not count."""
    try:
        return os.path.samefile(path, f"/old{path}")
    except OSError:
        return False


def _mount_point(path: str) -> str:
    """Create an empty file or folder to mount on."""
    if os.path.isdir(f"/old{path}"):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    return path
