"""The dialect of Granite 3: a JSON array of calls after a mark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.tool_calls.base import BlockDialect
from rollouts.tool_calls.json import MalformedCallError, json_calls, json_prefix, name_in, unreadable

__all__ = ["Granite"]


class Granite(BlockDialect):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}]``."""

    name = "granite"
    marks = ("<|tool_call|>",)
    block = re.compile(r"<\|tool_call\|>\s*(?P<body>.*?)(?=<\|tool_call\|>|\Z)", re.DOTALL)

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        return self.take(block, tools)[0]

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        try:
            value, end = json_prefix(block["body"])
        except MalformedCallError as error:
            return [unreadable(block[0], error, name_in(block["body"]))], block.end()
        end += block.start("body")
        return json_calls(value, block.string[block.start() : end]), end
