"""The sets of tools that the requests of one session offer.

Invariant: equal sets are one object, which the renderer finds again quickly, and each is tested once before it is
rendered. This module knows no request.
"""

from __future__ import annotations

from rollouts.dtypes import Tool
from rollouts.programs.gateway.normal import tools_key
from rollouts.renderer import Renderer
from rollouts.renderer.in_threads import in_thread

__all__ = ["ToolSets"]

_MOST_KEYS = 64


class ToolSets:
    """The sets of tools of one session.

    Args:
        renderer: tests whether calls of the tools would be lost.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tested: dict[bytes, tuple[Tool, ...]] = {}
        self._keys: dict[tuple[int, ...], tuple[bytes, tuple[Tool, ...]]] = {}
        """The keys of tools by the ids of their objects, with the objects, so that the ids stay theirs."""

    def key(self, tools: tuple[Tool, ...]) -> bytes:
        """The key of the tools; it is computed once where requests have the same objects."""
        objects = tuple(map(id, tools))
        if objects not in self._keys:
            if len(self._keys) >= _MOST_KEYS:
                self._keys.clear()
            self._keys[objects] = tools_key(tools), tools
        return self._keys[objects][0]

    @property
    def any_served(self) -> bool:
        """Whether a set that is not empty was tested."""
        return any(self._tested.values())

    async def tested(self, key: bytes, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        """The set with this key, once the renderer has tested it.

        Raises:
            ConfigError: calls of these tools would be lost.
        """
        if key not in self._tested:
            (await in_thread(self._renderer.self_test, tools)).raise_if_refused()
        return self._tested.setdefault(key, tools)
