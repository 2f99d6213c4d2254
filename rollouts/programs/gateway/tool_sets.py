"""The sets of tools that the requests of one session offer.

Invariant: equal sets are one object, which the renderer finds again quickly, and each is tested once before it is
rendered. Sessions of one renderer share the tests: a worker thread for each would cost more than the first request.
This module knows no request.
"""

from __future__ import annotations

import weakref

from rollouts.dtypes import Tool
from rollouts.programs.gateway.normal import tools_key
from rollouts.renderer import Renderer
from rollouts.renderer.in_threads import in_thread

__all__ = ["ToolSets"]

_MOST_KEYS = 64
_PLAIN = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
_MOST_TESTED = 256
"""Sets of one renderer that are kept: programs of a run have few, and each of them in every rollout."""
_TESTED: weakref.WeakKeyDictionary[Renderer, dict[bytes, tuple[Tool, ...]]] = weakref.WeakKeyDictionary()
"""The sets that were tested and not refused, by renderer and key."""


class ToolSets:
    """The sets of tools of one session.

    Args:
        renderer: tests whether calls of the tools would be lost. The sessions of a run share it.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tested = _TESTED.setdefault(renderer, {})
        self._keys: dict[tuple[int, ...], tuple[bytes, tuple[Tool, ...]]] = {}
        """The keys of tools by the ids of their objects, with the objects, so that no other object gets the ids."""

    def key(self, tools: tuple[Tool, ...]) -> bytes:
        """The key of the tools; it is computed once where requests have the same objects."""
        objects = tuple(map(id, tools))
        if objects not in self._keys:
            if len(self._keys) >= _MOST_KEYS:
                self._keys.clear()
            self._keys[objects] = tools_key(tools), tools
        return self._keys[objects][0]

    async def serves_any(self) -> bool:
        """Whether a session was served tools with this renderer, or would be served one with a plain name."""
        if any(self._tested.values()):
            return True
        return (await in_thread(self._renderer.self_test, (_PLAIN,))).verdict != "refused"

    async def tested(self, key: bytes, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        """The set with this key, once the renderer has tested it.

        Raises:
            ConfigError: calls of these tools would be lost.
        """
        if key not in self._tested:
            (await in_thread(self._renderer.self_test, tools)).raise_if_refused()
            if len(self._tested) >= _MOST_TESTED:
                del self._tested[next(key for key, kept in self._tested.items() if kept)]
        return self._tested.setdefault(key, tools)
