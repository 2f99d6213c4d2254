"""The dialects of GLM-4.5 and later, and of Hunyuan 3: keys and values in tags after the name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import MalformedCallError, typed_value, unclosed, unreadable
from rollouts.renderer.dialects.sections import SectionDialect, tagged_arguments

__all__ = ["Glm", "HunyuanV3"]

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


_S = r"(?::\w+)?"  # the marks of a release end in its name, as in <tool_call:opensource>
_PAIR = re.compile(
    rf"<arg_key{_S}>(?P<key>.*?)</arg_key{_S}>\s*<arg_value{_S}>(?P<value>.*?)</arg_value{_S}>"
    rf"(?=\s*(?:<arg_key{_S}>|\Z))",
    re.DOTALL,
)


class HunyuanV3(SectionDialect):
    """``<tool_calls><tool_call>name<tool_sep>``, GLM's keys and values, ``</tool_call></tool_calls>``."""

    name = "hunyuan_v3"
    marks = ("<tool_call:", "<tool_calls:", "<tool_call>", "<tool_calls>")
    block = re.compile(
        rf"(?:<tool_calls{_S}>|(?=<tool_call{_S}>))(?P<body>.*?)(?:</tool_calls{_S}>|\Z)",
        re.DOTALL,
    )
    call = re.compile(
        rf"<tool_call{_S}>(?P<name>.*?)(?:<tool_sep{_S}>(?P<arguments>.*?))?"
        rf"(?:(?P<close></tool_call{_S}>)|(?=<tool_call{_S}>)|\Z)",
        re.DOTALL,
    )
    closing = "</tool_call>"
    reasoning = ("<think:opensource>", "</think:opensource>")

    def name_of(self, call: re.Match[str]) -> str:
        return str(call["name"]).strip() if call["arguments"] is not None else ""

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        name = self.name_of(call)
        if not name:
            raise MalformedCallError("the name of a tool and <tool_sep> must follow <tool_call>", "no_name")
        pairs = tagged_arguments(_PAIR, call["arguments"])
        return ToolCall(name, {p["key"]: typed_value(tools, name, p["key"], p["value"]) for p in pairs}, raw=call[0])
