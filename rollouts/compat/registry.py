"""Agents and benchmarks by name: registered, named by module, or brought by an installed package's entry point.

Invariant: a name that cannot be had says why: it is not there (and which are), or it is unavailable because of what its
loading raised. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from rollouts.errors import ConfigError

__all__ = ["Registry"]


class Registry:
    """Things of one kind by name.

    Args:
        kind: for messages, e.g. ``"benchmark"``.
        group: the entry points that bring further ones.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._known: dict[str, Callable[[], Any]] = {}

    def __repr__(self) -> str:
        return f"<Registry of {self.kind}s: {', '.join(self.names)}>"

    @property
    def names(self) -> list[str]:
        """All names, those of entry points among them."""
        return sorted({*self._known, *(point.name for point in importlib.metadata.entry_points(group=self.group))})

    def register(self, name: str, thing: Any) -> None:
        """Register an object, or a path ``package.module:attribute`` that is imported when it is asked for."""
        self._known[name] = (lambda: _at(thing)) if isinstance(thing, str) else (lambda: thing)

    def get(self, name: str) -> Any:
        """The thing of this name, or at this path.

        Raises:
            ConfigError: there is none, or it is unavailable.
        """
        load = self._known.get(name)
        if load is None:
            points = importlib.metadata.entry_points(group=self.group, name=name)
            load = next((point.load for point in points), None)
        if load is None and ":" in name:
            load = lambda: _at(name)  # noqa: E731 - as short as the others
        if load is None:
            there = ", ".join(self.names) or "none"
            raise ConfigError.of(self.kind, name, f"one of those registered ({there}), or package.module:attribute")
        try:
            return load()
        except Exception as error:  # whatever an import of foreign code raises is why the name cannot be had
            raise ConfigError(f"{self.kind} {name!r} is unavailable because {type(error).__name__}: {error}") from error

    def unavailable(self) -> dict[str, str]:
        """Names that cannot be loaded, and why."""
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
