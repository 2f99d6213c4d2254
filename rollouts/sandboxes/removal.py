"""Deletion of a tree that a program made.

Invariant: it follows no link, also where another process puts a link in a folder's place, and touches no tree
of another user. It needs neither a stack nor a path as deep as the tree. It uses the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["remove_tree"]


def remove_tree(folder: str) -> None:
    """Delete a tree, whatever rights its folders have: moves the content of folders up instead of descending.

    Raises:
        OSError: the folder is a link or another user's, something cannot be deleted, or another process changes the
            tree meanwhile.
    """
    state = os.lstat(folder)
    if stat.S_ISLNK(state.st_mode):
        raise OSError(errno.ELOOP, "it is a link")
    if state.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it is another user's")
    moved = 0
    here = _opened(folder)
    try:
        if os.fstat(here).st_uid != os.geteuid():
            raise OSError(errno.EPERM, "it is another user's")
        while names := os.listdir(here):
            for name in names:
                if not stat.S_ISDIR(os.lstat(name, dir_fd=here).st_mode):
                    os.unlink(name, dir_fd=here)
                    continue
                inner = _opened(name, here)
                try:
                    for child in os.listdir(inner):
                        moved += 1
                        if stat.S_ISDIR(os.lstat(child, dir_fd=inner).st_mode):
                            os.close(_opened(child, inner))  # without the right to write to it, it cannot be moved
                        os.rename(child, f".{moved}-{os.getpid()}", src_dir_fd=inner, dst_dir_fd=here)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(folder)


def _opened(name: str, above: int | None = None) -> int:
    """Open a folder, and give this user all rights to it."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        number = os.open(name, os.O_RDONLY | flags, dir_fd=above)
    except PermissionError:  # it may not be read
        _grant(name, above, flags)
        number = os.open(name, os.O_RDONLY | flags, dir_fd=above)
    os.fchmod(number, 0o700)
    return number


def _grant(name: str, above: int | None, flags: int) -> None:
    if not hasattr(os, "O_PATH"):
        os.chmod(name, 0o700, dir_fd=above, follow_symlinks=False)
        return
    number = os.open(name, os.O_PATH | flags, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{number}", 0o700)
    finally:
        os.close(number)
