"""Which packages are installed; a folder of the same name that can be imported is not."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

__all__ = ["is_installed", "needing"]


def is_installed(distribution: str) -> bool:
    """Whether there is a package of this name on PyPI's terms."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def needing(distribution: str, value: Any, name: str) -> Any:
    """A parameter of a test, called ``name``; one that needs a package is skipped without it, and is marked."""
    marks: list[Any] = []
    if distribution:
        reason = f"{distribution} is not installed"
        marks = [pytest.mark.extra, pytest.mark.skipif(not is_installed(distribution), reason=reason)]
    return pytest.param(value, id=name.replace(" ", "-"), marks=marks)
