"""The packages of an extra: whether one is installed, and the command that installs them by their names.

On PyPI the name of this package is that of another project.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from rollouts.errors import ConfigError

__all__ = ["check_installed", "imported", "install_command", "is_installed"]


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    return importlib.util.find_spec(package) is not None


def check_installed(what: str, packages: Sequence[str], extra: str, otherwise: str = "") -> None:
    """Check that the packages that ``what`` needs can be imported.

    Raises:
        ConfigError: one cannot; the message has the command that installs the extra, and ends with ``otherwise``.
    """
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}: {install_command(extra)}{otherwise}")


def imported(module: str, package: str, extra: str) -> Any:
    """Import a module of a package, which has this name where it is published.

    Raises:
        ConfigError: it is not installed; the message has the command that installs the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{package} is not installed: {install_command(extra)}") from error


def install_command(extra: str) -> str:
    """The ``pip`` command for an extra, e.g. ``pip install "pyarrow>=17"``."""
    import importlib.metadata  # here: only a message needs these

    from packaging.requirements import Requirement

    from rollouts.base.torch_index import torch_index

    try:
        requirements = [*map(Requirement, importlib.metadata.requires("rollouts") or [])]
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    packages = [
        f'"{each.name}{each.specifier}"'
        for each in requirements
        if each.marker and each.marker.evaluate({"extra": extra}) and not each.marker.evaluate({"extra": ""})
    ]
    if not packages:  # a source tree that is on the path, or that has changed since it was installed
        return f"install the packages of the extra {extra} in pyproject.toml"
    return f"pip install {' '.join(packages)}{torch_index(extra)}"
