"""The dialect of PLaMo 3: requests with a name and JSON arguments, each between its marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.json import MalformedCallError, checked_arguments, json_value
from rollouts.renderer.dialects.sections import SectionDialect, section

__all__ = ["Plamo3"]


def _mark(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


_BEGIN = re.escape(_mark("begin_tool_request"))
_FORM = re.compile(
    rf"\s*{re.escape(_mark('begin_tool_name'))}(?P<name>.*?){re.escape(_mark('end_tool_name'))}\s*"
    rf"{re.escape(_mark('begin_tool_arguments'))}(?:<\|plamo:constrain\|>json)?(?:<\|plamo:msg\|>)?"
    rf"(?P<arguments>.*){re.escape(_mark('end_tool_arguments'))}\s*",
    re.DOTALL,
)
_NAME = re.compile(rf"{re.escape(_mark('begin_tool_name'))}(?P<name>.*?){re.escape(_mark('end_tool_name'))}", re.DOTALL)


class Plamo3(SectionDialect):
    """``begin_tool_request``, a name and ``{...}``, each between marks as ``<|plamo:begin_tool_name:plamo|>``."""

    name = "plamo3"
    marks = (_mark("begin_tool_requests"), _mark("begin_tool_request"))
    block = section(_mark("begin_tool_requests"), _mark("end_tool_requests"), _mark("begin_tool_request"))
    call = re.compile(
        rf"{_BEGIN}(?P<body>.*?)(?:(?P<close>{re.escape(_mark('end_tool_request'))})|(?={_BEGIN})|\Z)", re.DOTALL
    )
    closing = _mark("end_tool_request")
    reasoning = (_mark("begin_think"), _mark("end_think"))

    def name_of(self, call: re.Match[str]) -> str:
        name = _NAME.search(call["body"])
        return name["name"].strip() if name else ""

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        form, name = _FORM.fullmatch(call["body"]), self.name_of(call)
        if not name:
            raise MalformedCallError(
                f"the name of a tool must stand between {_mark('begin_tool_name')} and its end", "no_name"
            )
        if form is None:
            raise MalformedCallError("the arguments must follow the name, between their marks", "no_arguments")
        return ToolCall(name, checked_arguments(json_value(form["arguments"])), raw=call[0])
