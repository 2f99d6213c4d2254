"""The dialect of Hermes, Qwen2.5, Qwen3, QwQ and Granite 4: JSON objects in ``<tool_call>`` tags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import json_call, name_in, unclosed

__all__ = ["Hermes"]


class Hermes(BlockDialect):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one object in each pair of tags."""

    name = "hermes"
    marks = ("<tool_call>",)
    stop_replaces = "</tool_call>"
    # A second opening tag ends an unclosed block, so that a missing tag does not hide the calls after it.
    block = re.compile(r"<tool_call>(?P<body>.*?)(?:(?P<close></tool_call>)|(?=<tool_call>)|\Z)", re.DOTALL)

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        if block["close"] is None:
            return [unclosed(block[0], "</tool_call>", name_in(block["body"]))]
        return [json_call(block["body"], block[0])]
