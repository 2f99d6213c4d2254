"""Text without tool calls: for models whose template knows no tools. Reasoning is still taken apart."""

from __future__ import annotations

from rollouts.tool_calls.base import BlockDialect

__all__ = ["Plain"]


class Plain(BlockDialect):
    """No calls at all."""

    name = "plain"

    def first(self, text: str, at: int) -> None:
        return None
