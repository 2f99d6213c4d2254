"""The dialect of Mistral: a JSON array with ids (Nemo), or name and arguments (Small 3.x, Ministral)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import (
    MalformedCallError,
    call_in_json,
    json_calls,
    json_prefix,
    name_in,
    unreadable,
)

__all__ = ["Mistral"]

_NAMED = re.compile(r"\s*(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\](?P<id>[^\[\]{}\s]+))?\[ARGS\]\s*")


class Mistral(BlockDialect):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`` or ``[TOOL_CALLS]name[ARGS]{...}``."""

    name = "mistral"
    marks = ("[TOOL_CALLS]",)
    block = re.compile(r"\[TOOL_CALLS\](?P<body>.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL)
    reasoning = ("[THINK]", "[/THINK]")

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        return self.take(block, tools)[0]

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        body, start = block["body"], block.start("body")
        named = _NAMED.match(body)
        try:
            value, end = json_prefix(body, named.end() if named else len(body) - len(body.lstrip()))
        except MalformedCallError as error:
            return [unreadable(block[0], error, named["name"] if named else name_in(body))], block.end()
        raw = block[0][: start - block.start() + end]
        if named:
            value = {"name": named["name"], "arguments": value, "id": named["id"]}
        return json_calls(value, raw, partial(call_in_json, id_key="id")), start + end
