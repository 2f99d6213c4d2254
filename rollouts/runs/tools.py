"""The tools of a run: ``tools/<sha256>.json``, each list of schemas once, however many samples name it.

Invariant: that of :mod:`rollouts.runs.hashed_files`. A stored row has the hash in place of the text; a row of an
earlier version has none, and its tools are unknown. This module knows no sample and no journal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.runs.hashed_files import HashedFiles

__all__ = ["TOOLS", "ToolFolder", "with_named_tools"]

TOOLS = "tools"
"""The folder of a run with its tools."""


class ToolFolder(HashedFiles):
    """The tools of a run or of an evaluation. Thread-safe.

    Args:
        path: the folder that contains ``tools``; it is created with the first list of tools.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path) / TOOLS, ".json", "list of tools")
        self._loaded: tuple[str, str] = ("", "")

    def write(self, tools: str | None) -> None:
        """Write a list of tools that is not there yet; returns when it is on disk.

        Raises:
            OSError: the disk refuses the write.
        """
        self.write_bytes(_by_hash(tools))

    async def store(self, tools: str | None) -> None:
        """As :meth:`write`, in a worker thread where there is something to write."""
        await self.store_bytes(_by_hash(tools))

    def load(self, sha256: str) -> str:
        """The list of tools with this hash, as JSON.

        Raises:
            ConfigError: there is no such file, or it has other bytes.
        """
        known, tools = self._loaded
        if known != sha256:
            tools = self.read(sha256).decode("utf-8", "replace")
            self._loaded = (sha256, tools)
        return tools

    def restored(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a stored sample with its tools in place of their hash; raises as :meth:`load`."""
        sha256 = fields.get("tools")
        return dict(fields) if sha256 is None else {**fields, "tools": self.load(sha256)}


def with_named_tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a sample with the hash of its tools in place of their text."""
    return {**fields, "tools": next(iter(_by_hash(fields["tools"])), None)}


def _by_hash(tools: str | None) -> dict[str, bytes]:
    data = b"" if tools is None else tools.encode("utf-8", "replace")
    return {} if tools is None else {hashlib.sha256(data).hexdigest(): data}
