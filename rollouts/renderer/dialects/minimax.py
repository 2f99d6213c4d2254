"""The dialects of MiniMax M2, dots and Step 3: calls and parameters in tags, values without quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.json import MalformedCallError, typed_value
from rollouts.renderer.dialects.sections import SectionDialect, section, tagged_arguments

__all__ = ["Dots", "MiniMax", "Step3", "invoke_pattern", "parameter_pattern"]


def parameter_pattern(tag: str) -> re.Pattern[str]:
    """The pattern of one argument in a tag."""
    return re.compile(
        rf'<{tag} name="(?P<key>[^"\n]*)">(?P<value>.*?)</{tag}>(?=\s*(?:<{tag} |\Z))',
        re.DOTALL,
    )


def invoke_pattern(tag: str, before: str = "", after: str = "") -> re.Pattern[str]:
    """The pattern of one call in a tag, with marks before and after it."""
    return re.compile(
        rf'{before}<{tag} name="(?P<name>[^"\n]*)">(?P<body>.*?)(?:(?P<close></{tag}>{after})|(?=<{tag} )|\Z)',
        re.DOTALL,
    )


class MiniMax(SectionDialect):
    """``<minimax:tool_call><invoke name="f"><parameter name="key">value</parameter></invoke></minimax:tool_call>``."""

    name = "minimax"
    marks: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", '<invoke name="')
    block = section("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="')
    call = invoke_pattern("invoke")
    closing = "</invoke>"
    parameter: ClassVar[re.Pattern[str]] = parameter_pattern("parameter")

    def name_of(self, call: re.Match[str]) -> str:
        return call["name"]

    def tool_of(self, written: str, tools: Sequence[Tool]) -> str:
        """The name of the tool that a written name calls."""
        return written

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        name = self.tool_of(call["name"], tools)
        if not name:
            raise MalformedCallError("the name of a tool is missing", "no_name")
        pairs = tagged_arguments(self.parameter, call["body"])
        return ToolCall(name, {p["key"]: typed_value(tools, name, p["key"], p["value"]) for p in pairs}, raw=call[0])


class Dots(MiniMax):
    """dots: the same in ``<dots_function_call>``."""

    name = "dots"
    marks = ("<dots_function_call>", '<invoke name="')
    block = section("<dots_function_call>", "</dots_function_call>", '<invoke name="')


class Step3(MiniMax):
    """Step 3: ``<steptml:invoke name="f">`` between ``<｜tool_call_begin｜>`` and ``<｜tool_call_end｜>``."""

    name = "step3"
    marks = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", '<steptml:invoke name="')
    block = re.compile(
        r"(?:<｜tool_calls_begin｜>|(?=<｜tool_call_begin｜>)|(?=<steptml:invoke ))(?P<body>.*?)"
        r"(?:<｜tool_calls_end｜>|\Z)",
        re.DOTALL,
    )
    call = invoke_pattern(
        "steptml:invoke", r"(?:<｜tool_call_begin｜>\s*(?:function<｜tool_sep｜>)?\s*)?", r"(?:\s*<｜tool_call_end｜>)?"
    )
    closing = "</steptml:invoke>"
    parameter = parameter_pattern("steptml:parameter")
