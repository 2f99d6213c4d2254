"""Locked files: one holder at a time, in this process and among all others.

Invariant: a lock ends with its holder, however that dies. A file that is locked is never removed by its holder, so that
two processes cannot hold two files of one name.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["is_locked", "take_lock"]


def take_lock(path: Path) -> int | None:
    """Lock a file, which is made where it is not there.

    Returns:
        A descriptor, which holds the lock until it is closed; ``None`` where another one holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    return descriptor if _locked(descriptor, fcntl.LOCK_EX) else None


def is_locked(path: Path) -> bool:
    """Whether the lock of a file is held; nothing is written."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    free = _locked(descriptor, fcntl.LOCK_SH)
    if free:
        os.close(descriptor)
    return not free


def _locked(descriptor: int, how: int) -> bool:
    """Whether the lock was free; a descriptor that does not get it is closed."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True
