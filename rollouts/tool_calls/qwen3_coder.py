"""The dialect of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3: parameters in tags, values without quotes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.tool_calls.base import BlockDialect
from rollouts.tool_calls.json import MalformedCallError, typed_value, unreadable
from rollouts.tool_calls.sections import tagged_arguments

__all__ = ["Qwen3Coder"]

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*)</function>\s*\Z", re.DOTALL)
_NAME = re.compile(r"<function=([^>\n]+)>")
# A closing tag counts only before another parameter or the end, so that a value may contain one.
_PARAMETER = re.compile(
    r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


class Qwen3Coder(BlockDialect):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    The first and the last newline of a value belong to the tags. Types come from the tool's schema.
    """

    name = "qwen3_coder"
    marks = ("<tool_call>", "<function=")
    # The model sometimes omits the outer tag: that is a malformed call, not text.
    block = re.compile(
        r"<tool_call>(?P<body>.*?)(?:(?P<close></tool_call>)|(?=<tool_call>)|\Z)"
        r"|<function=[^>\n]+>.*?(?:</function>\s*(?:</tool_call>)?|\Z)",
        re.DOTALL,
    )

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        match = _NAME.search(block[0])
        name = match.group(1).strip() if match else ""
        try:
            return [ToolCall(name, _arguments(block, name, tools), raw=block[0])]
        except MalformedCallError as error:
            return [unreadable(block[0], error, name)]


def _arguments(block: re.Match[str], name: str, tools: Sequence[Tool]) -> dict[str, object]:
    if block["body"] is None:
        raise MalformedCallError("<tool_call> before <function=...> is missing")
    if block["close"] is None:
        raise MalformedCallError("</tool_call> is missing", "unclosed")
    function = _FUNCTION.match(block["body"])
    if function is None:
        raise MalformedCallError("it must be one <function=name> with its </function> between the tags")
    pairs = tagged_arguments(_PARAMETER, function["body"])
    return {argument["key"]: typed_value(tools, name, argument["key"], argument["value"]) for argument in pairs}
