"""Entry points of a group: objects that other distributions add by name.

Invariant: names are read without an import. A plug-in that cannot be used is a ConfigError that names its distribution,
raised when it is loaded, so that it never hides the names of others.

Most environments have no plug-in, and ``importlib.metadata`` takes longer to import than the rest of
``rollouts --help``: it is imported where a file of entry points names the group.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.errors import ConfigError

if TYPE_CHECKING:
    import importlib.metadata

__all__ = ["Plugin", "plugins"]


class Plugin(NamedTuple):
    """One name of a group."""

    group: str
    name: str
    points: tuple[importlib.metadata.EntryPoint, ...]
    """One, unless distributions add the same name."""

    @property
    def distribution(self) -> str:
        """The distribution that adds it, with its version."""
        found = [f"{point.dist.name} {point.dist.version}" if point.dist else point.value for point in self.points]
        return " and ".join(found)

    def load(self) -> Any:
        """Import it.

        Raises:
            ConfigError: the import raised an error, or several distributions add the name.
        """
        if len(self.points) > 1:
            raise self.refused("the name is added twice; uninstall one of them")
        try:
            return self.points[0].load()
        except Exception as error:  # an import of foreign code raises any type
            raise self.refused(f"{type(error).__name__}: {error}") from error

    def refused(self, reason: str) -> ConfigError:
        """The error for a plug-in that cannot be used."""
        return ConfigError(f"{self.group}: {self.name!r} of {self.distribution} cannot be loaded: {reason}")


def plugins(group: str) -> dict[str, Plugin]:
    """The entry points of a group by name, sorted."""
    if not _are_possible(group):
        return {}
    import importlib.metadata  # see the head of this module

    found: dict[str, tuple[importlib.metadata.EntryPoint, ...]] = {}
    for point in importlib.metadata.entry_points(group=group):
        found[point.name] = (*found.get(point.name, ()), point)
    return {name: Plugin(group, name, found[name]) for name in sorted(found)}


def _are_possible(group: str) -> bool:
    """Whether a distribution may add entry points to a group: a file names it, or is where only a full search looks."""
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    header = f"[{group}]".encode()
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except NotADirectoryError:  # a zip file
            return True
        except OSError:
            continue
        for name in ["EGG-INFO"] if folder.endswith(".egg") else names:
            if name.endswith((".dist-info", ".egg-info", "EGG-INFO")) and header in _entry_points_of(folder, name):
                return True
    return False


def _entry_points_of(folder: str, name: str) -> bytes:
    try:
        with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
            return file.read()
    except OSError:
        return b""
