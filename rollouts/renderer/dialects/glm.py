"""The dialects of GLM-4.5 and later, IQuest, LongCat 2, and Hunyuan 3 and 4: keys and values in tags after the name."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect, Reply
from rollouts.renderer.dialects.json import MalformedCallError, typed_value, unclosed, unreadable
from rollouts.renderer.dialects.sections import SectionDialect, tagged_arguments

__all__ = ["Glm", "HunyuanV3", "HunyuanV4", "IQuest", "LongCat2"]


def _glm_name(key: str) -> re.Pattern[str]:
    return re.compile(rf"\s*([^<\s]+)\s*(?=<{key}>|\Z)")


def _glm_argument(key: str, value: str) -> re.Pattern[str]:
    return re.compile(
        rf"<{key}>(?P<key>(?:(?!</{key}>).)*)</{key}>\s*<{value}>(?P<value>.*?)</{value}>(?=\s*(?:<{key}>|\Z))",
        re.DOTALL,
    )


def _glm_block(tag: str) -> re.Pattern[str]:
    return re.compile(rf"<{tag}>(?P<body>.*?)(?:(?P<close></{tag}>)|(?=<{tag}>)|\Z)", re.DOTALL)


class Glm(BlockDialect):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``; strings without quotes."""

    name = "glm"
    tag: ClassVar[str] = "tool_call"
    marks = ("<tool_call>",)
    block = _glm_block("tool_call")
    head: ClassVar[re.Pattern[str]] = _glm_name("arg_key")
    argument: ClassVar[re.Pattern[str]] = _glm_argument("arg_key", "arg_value")

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        body = block["body"]
        match = self.head.match(body)
        name = match.group(1) if match else ""
        try:
            if block["close"] is None:
                return [unclosed(block[0], f"</{self.tag}>", name)]
            if match is None:
                raise MalformedCallError(f"the name of a tool must follow <{self.tag}>", "no_name")
            pairs = tagged_arguments(self.argument, body[match.end() :])
            arguments = {p["key"].strip(): typed_value(tools, name, p["key"].strip(), p["value"]) for p in pairs}
        except MalformedCallError as error:
            return [unreadable(block[0], error, name)]
        return [ToolCall(name, arguments, raw=block[0])]


class IQuest(Glm):
    """IQuest Q1: the same in ``<iquest_tool_call>``."""

    name = "iquest"
    tag = "iquest_tool_call"
    marks = ("<iquest_tool_call>",)
    block = _glm_block("iquest_tool_call")


class LongCat2(Glm):
    """LongCat 2: the same in ``<longcat_tool_call>``, with ``<longcat_arg_key>`` and ``<longcat_arg_value>``."""

    name = "longcat_2"
    tag = "longcat_tool_call"
    marks = ("<longcat_tool_call>",)
    block = _glm_block("longcat_tool_call")
    head = _glm_name("longcat_arg_key")
    argument = _glm_argument("longcat_arg_key", "longcat_arg_value")
    reasoning = ("<longcat_think>", "</longcat_think>")


_S = r"(?::[^\s<>]+)?"  # the marks of a release end in its name, as in <tool_call:opensource>
_PAIR = re.compile(
    rf"<arg_key{_S}>(?P<key>(?:(?!</arg_key{_S}>).)*)</arg_key{_S}>\s*<arg_value{_S}>(?P<value>.*?)</arg_value{_S}>"
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


_PREFIX = 100
_THOUGHT = re.compile(rf"<think{_S}>\s*\Z"), re.compile(rf"<think({_S})>")


class HunyuanV4(HunyuanV3):
    """``<tool_calls><tool_call>name``, GLM's keys and values, ``</tool_call></tool_calls>``.

    Each checkpoint has a suffix for all its marks, as in ``<think:6124c78e>``.
    """

    name = "hunyuan_v4"
    reads_prefix: ClassVar[bool] = True
    call = re.compile(
        rf"<tool_call{_S}>(?P<name>[^<]*)(?P<arguments>.*?)(?:(?P<close></tool_call{_S}>)|(?=<tool_call{_S}>)|\Z)",
        re.DOTALL,
    )
    reasoning = ("<think>", "</think>")

    def name_of(self, call: re.Match[str]) -> str:
        return str(call["name"]).strip()

    def parse(
        self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None, prefix: str = ""
    ) -> Reply:
        ends_open, opening = _THOUGHT
        found = opening.search(prefix[-_PREFIX:] + text)
        suffix = found[1] if found else ""
        if ends_open.search(prefix):
            reasoning_open = True
        suffixed = copy.copy(self)
        suffixed.reasoning = (f"<think{suffix}>", f"</think{suffix}>")  # type: ignore[misc]  # of this reply
        return super(HunyuanV4, suffixed).parse(text, tools=tools, reasoning_open=reasoning_open)
