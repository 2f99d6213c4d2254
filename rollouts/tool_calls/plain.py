"""Text without tool calls: for models whose template knows no tools. Reasoning is still taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.tool_calls.base import BlockDialect

__all__ = ["Plain"]


class Plain(BlockDialect):
    """No calls at all."""

    name = "plain"
    block = re.compile(r"(?!)")

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        return ()
