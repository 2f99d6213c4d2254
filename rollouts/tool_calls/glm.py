"""The dialect of GLM-4.5 and later: keys and values in tags after the name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.tool_calls.base import BlockDialect
from rollouts.tool_calls.json import MalformedCallError, typed_value, unclosed, unreadable
from rollouts.tool_calls.sections import tagged_arguments

__all__ = ["Glm"]

_NAME = re.compile(r"\s*([^<\s]+)\s*(?=<arg_key>|\Z)")
_ARGUMENT = re.compile(
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)


class Glm(BlockDialect):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``; strings without quotes."""

    name = "glm"
    marks = ("<tool_call>",)
    block = re.compile(r"<tool_call>(?P<body>.*?)(?:(?P<close></tool_call>)|(?=<tool_call>)|\Z)", re.DOTALL)

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        body = block["body"]
        match = _NAME.match(body)
        name = match.group(1) if match else ""
        try:
            if block["close"] is None:
                return [unclosed(block[0], "</tool_call>", name)]
            if match is None:
                raise MalformedCallError("the name of a tool must follow <tool_call>", "no_name")
            pairs = tagged_arguments(_ARGUMENT, body[match.end() :])
            arguments = {p["key"].strip(): typed_value(tools, name, p["key"].strip(), p["value"]) for p in pairs}
        except MalformedCallError as error:
            return [unreadable(block[0], error, name)]
        return [ToolCall(name, arguments, raw=block[0])]
