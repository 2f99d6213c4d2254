"""Folders of sandboxes, and the removal of those whose process died before it could remove them.

Invariant: a folder is swept only if its process has ended: each process holds the lock of one file, whose name is in
the names of its folders, until it dies. Only folders and files of this user are touched, and no link is followed. On
Windows, which has no such lock, nothing is swept.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator

from rollouts.sandboxes.removal import remove_tree

if sys.platform != "win32":
    import fcntl

__all__ = ["Folders"]

_LOCK = ".lock"


class Folders:
    """The folders of one kind of sandbox that this process makes in the folder for temporary files. Thread-safe.

    Args:
        kind: the start of their names, ``rollouts-KIND-``.

    The first folder sweeps those of processes that have ended.
    """

    def __init__(self, kind: str) -> None:
        self._prefix = f"rollouts-{kind}-"
        self._lock = threading.Lock()
        self._owner: tuple[int, str] | None = None
        """This process and the mark of its folders; a fork makes another."""

    def new(self) -> str:
        """Make a folder; returns its path."""
        with self._lock:
            if self._owner is None or self._owner[0] != os.getpid():
                self.sweep()
                self._owner = (os.getpid(), self._locked_mark())
        return os.path.realpath(tempfile.mkdtemp(prefix=f"{self._prefix}{self._owner[1]}-"))

    @contextlib.contextmanager
    def temporary(self) -> Iterator[str]:
        """Make a folder, and remove it at the end."""
        folder = self.new()
        try:
            yield folder
        finally:
            remove_tree(folder)

    def sweep(self) -> list[str]:
        """Remove the folders of processes that have ended; returns their paths."""
        swept: list[str] = []
        start = os.path.join(glob.escape(tempfile.gettempdir()), self._prefix)
        for lock in glob.glob(f"{start}*{_LOCK}"):
            descriptor = _taken(lock)
            if descriptor is None:
                continue
            try:
                for folder in glob.glob(f"{glob.escape(lock.removesuffix(_LOCK))}-*"):
                    with contextlib.suppress(OSError):  # of another user, or a program is still in it
                        remove_tree(folder)
                        swept.append(folder)
                if not glob.glob(f"{glob.escape(lock.removesuffix(_LOCK))}-*"):
                    os.unlink(lock)
            finally:
                os.close(descriptor)
        return swept

    def _locked_mark(self) -> str:
        """A mark whose file this process has locked."""
        while True:
            mark = uuid.uuid4().hex[:12]
            path = os.path.join(tempfile.gettempdir(), f"{self._prefix}{mark}{_LOCK}")
            if sys.platform == "win32":
                return mark
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            if _taken(path) is not None:  # and stays open until this process ends
                return mark


def _taken(path: str) -> int | None:
    """A descriptor with the lock of a file of this user; ``None`` if another process has it, or removed the file."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        state, named = os.fstat(descriptor), os.stat(path)
        if state.st_uid == os.geteuid() and state.st_ino == named.st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
