"""Which packages are installed; a folder of the same name that can be imported is not."""

from __future__ import annotations

import importlib.metadata

__all__ = ["is_installed"]


def is_installed(distribution: str) -> bool:
    """Whether there is a package of this name on PyPI's terms."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
