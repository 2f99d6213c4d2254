"""The dialect of models whose template has no tools: text without calls. Reasoning is still separated."""

from __future__ import annotations

from rollouts.renderer.dialects.base import BlockDialect

__all__ = ["Plain"]


class Plain(BlockDialect):
    """A dialect without calls."""

    name = "plain"

    def first(self, text: str, at: int) -> None:
        return None
