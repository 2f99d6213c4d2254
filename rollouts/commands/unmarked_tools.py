"""Refuse an environment without tools whose methods only lack the mark of a tool."""

from __future__ import annotations

import inspect

from rollouts.environments.base import Environment, ToolEnvironment
from rollouts.errors import ConfigError

__all__ = ["check_marks"]


def check_marks(environment: Environment, name: str) -> None:
    """Refuse an environment without tools that has methods for the model.

    Raises:
        ConfigError: it has; the message names them.
    """
    if forgotten := _unmarked(environment):
        expected = f"@tool before the methods that the model may call: {', '.join(forgotten)}"
        raise ConfigError.of(f"{name}.tools", "none", expected)


def _unmarked(environment: Environment) -> list[str]:
    """The public methods of a :class:`ToolEnvironment` that the model should probably call.

    A method that another method of the class names is a helper. An environment with its own ``answer``, ``step`` or
    ``tools`` may have no tools on purpose.
    """
    kind, inherited = type(environment), ("answer", "step", "tools")
    if not isinstance(environment, ToolEnvironment):
        return []
    if any(getattr(kind, name) is not getattr(ToolEnvironment, name) for name in inherited):
        return []
    bases = kind.__mro__[: kind.__mro__.index(ToolEnvironment)]
    methods = {
        name: value for base in reversed(bases) for name, value in vars(base).items() if inspect.isfunction(value)
    }
    used = {name for method in methods.values() for name in inspect.unwrap(method).__code__.co_names}
    known = {*dir(ToolEnvironment), "snapshot", "restore", *used}
    return [name for name in methods if not name.startswith("_") and name not in known]
