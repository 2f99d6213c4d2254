"""Entry points of a group: objects that other distributions add by name.

Invariant: names are read without an import. A plug-in that cannot be used is a ConfigError that names its distribution,
raised when it is loaded, so that it never hides the names of others.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import attrs

from rollouts.errors import ConfigError

__all__ = ["Plugin", "plugins"]


@attrs.frozen
class Plugin:
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
    found: dict[str, tuple[importlib.metadata.EntryPoint, ...]] = {}
    for point in importlib.metadata.entry_points(group=group):
        found[point.name] = (*found.get(point.name, ()), point)
    return {name: Plugin(group, name, found[name]) for name in sorted(found)}
