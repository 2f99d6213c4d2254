"""The dialect of Llama 3.1, 3.2 and 3.3: bare JSON objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import MalformedCallError, either_call, json_prefix, name_in, unreadable

__all__ = ["LlamaJson"]

_TYPE = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_NEXT = re.compile(r"\s*;?\s*(?=\{)")


class LlamaJson(BlockDialect):
    """``{"name": ..., "parameters": {...}}``, bare or after ``<|python_tag|>``; several in a row.

    At the start of the answer, every object that begins with a name is read as a call; after text, only an object with
    a name, then parameters. Any other object is an answer in JSON. ``arguments`` in place of the parameters are read
    too, as servers do (vLLM 0.33.0 and SGLang 0.5.23).
    """

    name = "llama_json"
    block = re.compile(
        r"(?:<\|python_tag\|>"
        rf'|(?:\A|(?<=</think>))\s*(?=\{{\s*{_TYPE}"name"\s*:)'
        rf'|(?=\{{\s*{_TYPE}"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:parameters|arguments)"\s*:))'
        r"(?P<body>)"
    )

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
                calls.append(either_call(value, raw))
            except MalformedCallError as error:
                calls.append(unreadable(raw, error, name_in(raw)))
        return calls, at
