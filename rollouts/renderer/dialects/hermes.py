"""The dialects with JSON objects in tags: Hermes, Qwen2.5, Qwen3, QwQ and Granite 4; Kimi-VL; LongCat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import json_call, name_in, unclosed

__all__ = ["Hermes", "KimiVL", "LongCat"]


def _block(tag: str) -> re.Pattern[str]:
    # A second opening tag ends an unclosed block, so that a missing tag does not hide the calls after it.
    return re.compile(rf"<{tag}>(?P<body>.*?)(?:(?P<close></{tag}>)|(?=<{tag}>)|\Z)", re.DOTALL)


class Hermes(BlockDialect):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one object in each pair of tags."""

    name = "hermes"
    marks = ("<tool_call>",)
    block = _block("tool_call")
    stop_replaces = "</tool_call>"

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        if block["close"] is None:
            return [unclosed(block[0], self.stop_replaces, name_in(block["body"]))]
        return [json_call(block["body"], block[0])]


class KimiVL(Hermes):
    """Kimi-VL: the same, with thoughts in ``◁think▷``."""

    name = "kimi_vl"
    reasoning = ("◁think▷", "◁/think▷")


class LongCat(Hermes):
    """LongCat: the same in ``<longcat_tool_call>``, with thoughts in ``<longcat_think>``."""

    name = "longcat"
    marks = ("<longcat_tool_call>",)
    block = _block("longcat_tool_call")
    stop_replaces = "</longcat_tool_call>"
    reasoning = ("<longcat_think>", "</longcat_think>")
