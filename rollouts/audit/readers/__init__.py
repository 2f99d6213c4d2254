"""The formats of ``rollouts audit``: readers of dumps that other systems write, by name.

Packages add a format by an entry point in the group ``rollouts.audit_readers``, whose value is a ``Reader``. Built-in
names cannot be replaced. Only the reader that is asked for is imported.
"""

from __future__ import annotations

import importlib

from rollouts.audit.rows import Reader
from rollouts.base.nearest import did_you_mean
from rollouts.base.plugins import plugins
from rollouts.errors import ConfigError

__all__ = ["ENTRY_POINTS", "FORMATS", "names", "reader_of"]

ENTRY_POINTS = "rollouts.audit_readers"

FORMATS = {
    "slime-pt": "slime_pt",
    "traces": "traces",
    "calls": "calls",
    "nemo-rl": "nemo_rl",
    "verl": "verl",
    "trl": "trl",
}
"""The built-in formats and their modules, each with a ``READER``."""


def names() -> list[str]:
    """The names of all formats."""
    return [*FORMATS, *(name for name in plugins(ENTRY_POINTS) if name not in FORMATS)]


def reader_of(name: str) -> Reader:
    """Import the reader of a format.

    Raises:
        ConfigError: the name is unknown, or a package's reader does not load or is of another type.
    """
    if name in FORMATS:
        reader: Reader = importlib.import_module(f"{__name__}.{FORMATS[name]}").READER
        return reader
    plugin = plugins(ENTRY_POINTS).get(name)
    if plugin is None:
        known = names()
        raise ConfigError.of("--format", name, f"one of {', '.join(known)}{did_you_mean(name, known)}")
    found = plugin.load()
    if not isinstance(found, Reader):
        raise plugin.refused(f"got {type(found).__name__}; expected a Reader of rollouts.audit")
    return found
