"""The dialect of Llama 3.1, 3.2 and 3.3: a bare JSON object as the whole reply."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.tool_calls.base import BlockDialect
from rollouts.tool_calls.json import MalformedCallError, call_in_json, json_prefix, name_in, unreadable

__all__ = ["LlamaJson"]

_NEXT = re.compile(r"\s*;?\s*(?=\{)")


class LlamaJson(BlockDialect):
    """``{"name": ..., "parameters": {...}}``, at the start of the reply or after ``<|python_tag|>``; several in a row.

    An object that does not begin with a name is a JSON answer, not a call.
    """

    name = "llama_json"
    block = re.compile(r'(?:<\|python_tag\|>|\A\s*(?=\{\s*"name"\s*:))(?P<body>.*)', re.DOTALL)

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        return self.take(block, tools)[0]

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        text, at = block.string, block.start("body")
        calls: list[ToolCall] = []
        while not calls or (more := _NEXT.match(text, at)):
            start = more.end() if calls and more else at + len(text[at:]) - len(text[at:].lstrip())
            try:
                value, at = json_prefix(text, start)
            except MalformedCallError as error:
                return [*calls, unreadable(text[start:], error, name_in(text[start:]))], len(text)
            raw = text[start:at]
            try:
                calls.append(call_in_json(value, raw, arguments="parameters"))
            except MalformedCallError as error:
                calls.append(unreadable(raw, error, name_in(raw)))
        return calls, at
