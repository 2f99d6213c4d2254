"""Check which packages are installed; an importable folder of the same name does not count."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

__all__ = ["is_installed", "needing"]


def is_installed(distribution: str) -> bool:
    """Whether a distribution with this PyPI name is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def needing(distribution: str, value: Any, name: str) -> Any:
    """Return a test parameter with the id ``name``, marked ``extra`` and skipped if its package is not installed."""
    marks: list[Any] = []
    if distribution:
        reason = f"{distribution} is not installed"
        marks = [pytest.mark.extra, pytest.mark.skipif(not is_installed(distribution), reason=reason)]
    return pytest.param(value, id=name.replace(" ", "-"), marks=marks)
