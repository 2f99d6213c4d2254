"""File locks: one holder at a time, within this process and across processes.

Invariant: the lock is released when its holder dies. The holder never removes the locked file; otherwise two processes
could lock two files of the same name.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["is_locked", "take_lock"]


def take_lock(path: Path) -> int | None:
    """Lock a file; creates it if it is missing.

    Returns:
        A descriptor that keeps the lock until it is closed; ``None`` if another holder has the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    return descriptor if _locked(descriptor, fcntl.LOCK_EX) else None


def is_locked(path: Path) -> bool:
    """Whether a file is locked; writes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    free = _locked(descriptor, fcntl.LOCK_SH)
    if free:
        os.close(descriptor)
    return not free


def _locked(descriptor: int, how: int) -> bool:
    """Try to lock without waiting; returns whether it succeeded, and closes the descriptor if not."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True
