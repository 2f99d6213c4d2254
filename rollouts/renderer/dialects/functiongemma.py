"""The dialect of FunctionGemma: ``key:value`` pairs, with ``<escape>`` as quotation mark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.gemma import pairs_in
from rollouts.renderer.dialects.json import MalformedCallError, typed_value, unclosed, unreadable
from rollouts.renderer.dialects.llama_pythonic import json_or_literal

__all__ = ["FunctionGemma"]

_HEAD = re.compile(r"\s*call:(?P<name>[^\s{}<]+)(?=\{)")


class FunctionGemma(BlockDialect):
    """``<start_function_call>call:name{key:<escape>text<escape>,count:3}<end_function_call>``.

    Some templates quote every value: a quoted value takes its type from the tool's schema, and is JSON or a Python
    literal if that allows no string.
    """

    name = "functiongemma"
    marks = ("<start_function_call>",)
    block = re.compile(
        r"<start_function_call>(?P<body>.*?)(?:(?P<close><end_function_call>)|(?=<start_function_call>)|\Z)", re.DOTALL
    )

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        body = block["body"]
        head = _HEAD.match(body)
        name = head["name"] if head else ""
        try:
            if block["close"] is None:
                return [unclosed(block[0], "<end_function_call>", name)]
            if head is None:
                raise MalformedCallError("call:name{...} must follow <start_function_call>", "no_name")
            fields, end = pairs_in(body, head.end(), "<escape>")
            if body[end:].strip():
                raise MalformedCallError(
                    "nothing may stand between the arguments and <end_function_call>", "bad_arguments"
                )
            arguments = {
                key: typed_value(tools, name, key, value, json_or_literal) if isinstance(value, str) else value
                for key, value in fields.items()
            }
        except MalformedCallError as error:
            return [unreadable(block[0], error, name)]
        return [ToolCall(name, arguments, raw=block[0])]
