"""The dialect of Kimi K2: a section of calls, each with an id ``functions.name:index`` or ``name:index``."""

from __future__ import annotations

import re

from rollouts.renderer.dialects.sections import NumberedCalls, section

__all__ = ["KimiK2"]

_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+):\d+")


class KimiK2(NumberedCalls):
    """``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``."""

    name = "kimi_k2"
    marks = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    block = section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>")
    call = re.compile(
        r"<\|tool_call_begin\|>(?P<id>.*?)(?:<\|tool_call_argument_begin\|>(?P<arguments>.*?))?"
        r"(?:(?P<close><\|tool_call_end\|>)|(?=<\|tool_call_begin\|>)|\Z)",
        re.DOTALL,
    )
    closing = "<|tool_call_end|>"
    about_name = "its id must have the form functions.name:index or name:index"
    arguments_mark = "<|tool_call_argument_begin|>"

    def name_of(self, call: re.Match[str]) -> str:
        match = _ID.fullmatch(call["id"].strip())
        return match["name"] if match else ""
