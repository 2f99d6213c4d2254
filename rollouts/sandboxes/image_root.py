"""The root folder of a mount namespace that is an image: a writable layer in memory over read-only folders.

Invariant: nothing that is written reaches the folders of the image, and everything is gone with the mount namespace.
The owners of the image's files are the users of the namespace with the same numbers. It uses the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rollouts.sandboxes import kernel
from rollouts.sandboxes.filesystem import DEVICES

__all__ = ["SHARED_BYTES", "build_image_root", "map_image"]

SHARED_BYTES = 64 << 20
"""The most that ``/dev/shm`` holds."""


def map_image(roots: Sequence[str], process: int) -> list[int]:
    """Copy the mounts of an image's folders, with owners mapped as in the user namespace of a process.

    Returns:
        Their descriptors, which may be passed to the process; none if we are not root: the one user that is mapped then
        owns the folders anyway.
    """
    if os.geteuid():
        return []
    users = os.open(f"/proc/{process}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [kernel.mapped_tree(root, users) for root in roots]
    finally:
        os.close(users)


def build_image_root(folder: str, roots: Sequence[int], *, disk_bytes: int, files: Mapping[str, str]) -> None:
    """Mount an overlay over the folders, and make it the root of this mount namespace.

    Args:
        folder: any folder, to mount on.
        roots: copies of mounts, the topmost first.
        disk_bytes: size of the writable layer; ``/dev/shm`` has as much, at most 64 MiB.
        files: files to write, by path.
    """
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    devices_only = kernel.MS_NOSUID | kernel.MS_NOEXEC
    inodes, shared = max(4096, disk_bytes // 4096), min(disk_bytes, SHARED_BYTES)
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NODEV, f"size={disk_bytes},nr_inodes={inodes},mode=755")
    lower = [f"{folder}/lower{number}" for number in range(len(roots))]
    upper, work, root = (f"{folder}/{name}" for name in ("upper", "work", "root"))
    for path in (*lower, upper, work, root):
        os.mkdir(path)
    for tree, path in zip(roots, lower, strict=True):
        kernel.mount_tree(tree, path)
        os.close(tree)
    os.chmod(upper, os.stat(lower[0]).st_mode & 0o7777)
    # userxattr: the attributes of the overlay are the user namespace's; trusted ones need the rights of the machine.
    options = f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work},userxattr"
    kernel.mount("overlay", root, "overlay", kernel.MS_NODEV, options)
    for name in ("proc", "dev", "tmp"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    kernel.mount("proc", f"{root}/proc", "proc", devices_only | kernel.MS_NODEV)
    kernel.mount("tmpfs", f"{root}/dev", "tmpfs", devices_only, "size=64k,mode=755")
    for path in (*DEVICES, "/dev/tty"):  # a terminal of the namespace: of tmux, asciinema, script
        os.close(os.open(f"{root}{path}", os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.bind_read_only(path, f"{root}{path}", devices=True)
    for name in ("shm", "pts"):
        os.mkdir(f"{root}/dev/{name}")
    kernel.mount("tmpfs", f"{root}/dev/shm", "tmpfs", devices_only | kernel.MS_NODEV, f"size={shared},mode=1777")
    kernel.mount("devpts", f"{root}/dev/pts", "devpts", devices_only, "newinstance,ptmxmode=0666,mode=620")
    for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    os.chdir(root)
    kernel.pivot_root(".", ".")  # the old root lies on top of the new one
    kernel.unmount(".")
    os.chdir("/")
    for path, text in files.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.islink(path):
            os.unlink(path)
        with open(path, "w") as file:
            file.write(text)
