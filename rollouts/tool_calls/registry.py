"""Which dialects there are, and which of them a chat template asks its model to write."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollouts.errors import ConfigError
from rollouts.tool_calls.base import Dialect
from rollouts.tool_calls.hermes import Hermes
from rollouts.tool_calls.plain import Plain

__all__ = ["DIALECTS", "dialect_of_template", "get_dialect"]

_ALL: tuple[Dialect, ...] = (Hermes(), Plain())

DIALECTS: Mapping[str, Dialect] = MappingProxyType({dialect.name: dialect for dialect in _ALL})
"""Every dialect by its name."""

_MARKS: tuple[tuple[str, str], ...] = (("<tool_call>", "hermes"),)
"""Text that gives a template's dialect away. The first mark that is found decides: the more special come first."""


def get_dialect(name: str) -> Dialect:
    """The dialect of this name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in DIALECTS:
        raise ConfigError.of("dialect", name, f"one of {', '.join(sorted(DIALECTS))}")
    return DIALECTS[name]


def dialect_of_template(template: str) -> str:
    """The name of the dialect that a chat template teaches; ``"plain"`` when it knows no calls."""
    return next((name for mark, name in _MARKS if mark in template), "plain")
