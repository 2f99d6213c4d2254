"""A registry of agents or benchmarks: registered objects, module paths, and entry points of installed packages.

Invariant: the error for a name gives the reason: it is unknown (with the known names), or loading it raised an error.
Nothing is loaded before its first use.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from rollouts.errors import ConfigError

__all__ = ["Registry"]


class Registry:
    """Objects of one kind by name.

    Args:
        kind: for messages, e.g. ``"benchmark"``.
        group: the entry point group that adds further names.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._known: dict[str, Callable[[], Any]] = {}

    def __repr__(self) -> str:
        return f"<Registry of {self.kind}s: {', '.join(self.names)}>"

    @property
    def names(self) -> list[str]:
        """All names, including those of entry points."""
        return sorted({*self._known, *(point.name for point in importlib.metadata.entry_points(group=self.group))})

    def register(self, name: str, thing: Any) -> None:
        """Register an object, or a path ``package.module:attribute`` that is imported on first use."""
        self._known[name] = (lambda: _at(thing)) if isinstance(thing, str) else (lambda: thing)

    def get(self, name: str) -> Any:
        """The object with this name, or at the path ``package.module:attribute``.

        Raises:
            ConfigError: the name is unknown, or loading it failed.
        """
        load = self._known.get(name)
        if load is None:
            points = importlib.metadata.entry_points(group=self.group, name=name)
            load = next((point.load for point in points), None)
        if load is None and ":" in name:
            load = lambda: _at(name)  # noqa: E731 - as short as the others
        if load is None:
            known = ", ".join(self.names) or "none"
            raise ConfigError.of(self.kind, name, f"a registered name ({known}), or package.module:attribute")
        try:
            return load()
        except Exception as error:  # an import of foreign code raises any type
            raise ConfigError(f"{self.kind} {name!r} is unavailable because {type(error).__name__}: {error}") from error

    def unavailable(self) -> dict[str, str]:
        """The names that cannot be loaded, with the error messages."""
        reasons = {}
        for name in self.names:
            try:
                self.get(name)
            except ConfigError as error:
                reasons[name] = str(error)
        return reasons


def _at(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
