"""The dialect of MiniMax M2: calls and parameters in tags, values without quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.json import MalformedCallError, typed_value
from rollouts.renderer.dialects.sections import SectionDialect, section, tagged_arguments

__all__ = ["MiniMax"]

_PARAMETER = re.compile(
    r'<parameter name="(?P<key>[^"\n]*)">(?P<value>.*?)</parameter>(?=\s*(?:<parameter |\Z))', re.DOTALL
)


class MiniMax(SectionDialect):
    """``<minimax:tool_call><invoke name="f"><parameter name="key">value</parameter></invoke></minimax:tool_call>``."""

    name = "minimax"
    marks = ("<minimax:tool_call>", '<invoke name="')
    block = section("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="')
    call = re.compile(
        r'<invoke name="(?P<name>[^"\n]*)">(?P<body>.*?)(?:(?P<close></invoke>)|(?=<invoke )|\Z)', re.DOTALL
    )
    closing = "</invoke>"

    def name_of(self, call: re.Match[str]) -> str:
        return call["name"]

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        name = call["name"]
        if not name:
            raise MalformedCallError("the name of a tool is missing", "no_name")
        pairs = tagged_arguments(_PARAMETER, call["body"])
        return ToolCall(name, {p["key"]: typed_value(tools, name, p["key"], p["value"]) for p in pairs}, raw=call[0])
