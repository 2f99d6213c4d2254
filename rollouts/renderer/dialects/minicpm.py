"""The dialect of MiniCPM 5: functions and parameters in tags, values as text, in CDATA or as literals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import MalformedCallError, typed_value, unclosed, unreadable
from rollouts.renderer.dialects.llama_pythonic import json_or_literal
from rollouts.renderer.dialects.sections import tagged_arguments

__all__ = ["MiniCPM"]

_NAME = re.compile(r'\s+name="(?P<name>[^"\n]+)"\s*>')
_PARAM = re.compile(
    r'<param\s+name="(?P<key>[^"\n]+)"\s*>(?:\s*<!\[CDATA\[(?P<quoted>.*?)\]\]>\s*|(?P<plain>(?!\s*<!\[CDATA\[).*?))'
    r"</param>(?=\s*(?:<param\s|\Z))",
    re.DOTALL,
)


class MiniCPM(BlockDialect):
    """``<function name="f"><param name="key">value</param></function>``; ``<![CDATA[...]]>`` quotes a value.

    A quoted value is text. Other values take their type from the tool's schema, and are JSON or Python literals, which
    the model's template writes.
    """

    name = "minicpm"
    marks = ("<function ",)
    block = re.compile(
        r"<function (?P<body>(?:<!\[CDATA\[.*?\]\]>|(?!</function>|<function ).)*)(?P<close></function>)?", re.DOTALL
    )

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        head = _NAME.match(" " + block["body"])
        name = head["name"] if head else ""
        try:
            if block["close"] is None:
                return [unclosed(block[0], "</function>", name)]
            if head is None:
                raise MalformedCallError('it must begin with <function name="...">', "no_name")
            arguments = {}
            for param in tagged_arguments(_PARAM, block["body"][head.end() - 1 :]):
                quoted, key = param["quoted"], param["key"]
                plain = typed_value(tools, name, key, param["plain"] or "", json_or_literal)
                arguments[key] = plain if quoted is None else quoted
        except MalformedCallError as error:
            return [unreadable(block[0], error, name)]
        return [ToolCall(name, arguments, raw=block[0])]
