"""The dialect of K2 Horizon: keys and values in tags, with or without types, or JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.json import MalformedCallError, call_in_json, json_value, typed_value
from rollouts.renderer.dialects.sections import SectionDialect, section, tagged_arguments

__all__ = ["K2Horizon"]

_NAME = re.compile(r"\s*(?P<name>[^<\s{]+)\s*(?=<ifm\|arg_key>|\Z)")
_ARGUMENT = re.compile(
    r"<ifm\|arg_key>(?P<key>.*?)</ifm\|arg_key>\s*(?:<ifm\|arg_type>(?P<type>.*?)</ifm\|arg_type>\s*)?"
    r"<ifm\|arg_value>(?P<value>.*?)</ifm\|arg_value>(?=\s*(?:<ifm\|arg_key>|\Z))",
    re.DOTALL,
)


class K2Horizon(SectionDialect):
    """``<ifm|tool_calls><ifm|tool_call>name<ifm|arg_key>k</ifm|arg_key><ifm|arg_value>v</ifm|arg_value></ifm|tool_call>``.

    A type in ``<ifm|arg_type>`` counts; else the tool's schema. The body of a call may also be
    ``{"name": ..., "arguments": {...}}``.
    """

    name = "k2_horizon"
    marks = ("<ifm|tool_calls>", "<ifm|tool_call>")
    block = section("<ifm|tool_calls>", "</ifm|tool_calls>", "<ifm|tool_call>")
    call = re.compile(
        r"<ifm\|tool_call>(?P<body>.*?)(?:(?P<close></ifm\|tool_call>)|(?=<ifm\|tool_call>)|\Z)", re.DOTALL
    )
    closing = "</ifm|tool_call>"
    reasoning = ("<ifm|think>", "</ifm|think>")

    def name_of(self, call: re.Match[str]) -> str:
        name = _NAME.match(call["body"])
        return name["name"] if name else ""

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        if call["body"].lstrip().startswith("{"):
            return call_in_json(json_value(call["body"]), call[0])
        head = _NAME.match(call["body"])
        if head is None:
            raise MalformedCallError("the name of a tool must follow <ifm|tool_call>", "no_name")
        pairs = tagged_arguments(_ARGUMENT, call["body"][head.end() :])
        arguments = {p["key"].strip(): _value(tools, head["name"], p) for p in pairs}
        return ToolCall(head["name"], arguments, raw=call[0])


def _value(tools: Sequence[Tool], name: str, pair: re.Match[str]) -> Any:
    kind, text = (pair["type"] or "").strip(), pair["value"]
    if not kind:
        return typed_value(tools, name, pair["key"].strip(), text)
    return text if kind in ("string", "str") else json_value(text)
