"""Files that survive the death of a machine: their bytes and their names are on disk when these functions return."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync", "sync_all"]


def sync(path: str | Path) -> None:
    """Write a file, or the names in a folder, to disk; returns when they are there."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_all(path: str | Path) -> None:
    """Write a file, or a folder with everything in it, to disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            sync(os.path.join(folder, name))
        sync(folder)
    if not os.path.isdir(path):
        sync(path)
