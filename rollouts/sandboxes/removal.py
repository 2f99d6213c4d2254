"""Deletion of a tree that a program made.

Invariant: it follows no link, and needs neither a stack nor a path as deep as the tree. It uses the standard library
only.
"""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["remove_tree"]


def remove_tree(folder: str) -> None:
    """Delete a tree, whatever rights its folders have: moves the content of folders up instead of descending.

    Raises:
        OSError: the folder is a link, something cannot be deleted, or another process changes the tree meanwhile.
    """
    if os.path.islink(folder):
        raise OSError(errno.ELOOP, "it is a link")
    moved = 0
    os.chmod(folder, 0o700)
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
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
                            os.chmod(child, 0o700, dir_fd=inner)
                        os.rename(child, f".{moved}-{os.getpid()}", src_dir_fd=inner, dst_dir_fd=here)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(folder)


def _opened(name: str, here: int) -> int:
    os.chmod(name, 0o700, dir_fd=here)  # not a link: the caller has checked
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
