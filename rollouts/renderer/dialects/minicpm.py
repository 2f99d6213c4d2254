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
_CLOSING = "</function>"
_MARKS = re.compile(r"</function>|<function |<!\[CDATA\[")


class MiniCPM(BlockDialect):
    """``<function name="f"><param name="key">value</param></function>``; ``<![CDATA[...]]>`` quotes a value.

    A quoted value is text. Other values take their type from the tool's schema, and are JSON or Python literals, which
    the model's template writes.
    """

    name = "minicpm"
    marks = ("<function ",)
    block = re.compile(r"<function ")

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        text = block.string
        stop, end = _end(text, block.end())
        raw, body = text[block.start() : end], text[block.end() : stop]
        head = _NAME.match(" " + body)
        name = head["name"] if head else ""
        try:
            if stop == end:
                return [unclosed(raw, _CLOSING, name)], end
            if head is None:
                raise MalformedCallError('it must begin with <function name="...">', "no_name")
            arguments = {}
            for param in tagged_arguments(_PARAM, body[head.end() - 1 :]):
                quoted, key = param["quoted"], param["key"]
                plain = typed_value(tools, name, key, param["plain"] or "", json_or_literal)
                arguments[key] = plain if quoted is None else quoted
        except MalformedCallError as error:
            return [unreadable(raw, error, name)], end
        return [ToolCall(name, arguments, raw=raw)], end


def _end(text: str, at: int) -> tuple[int, int]:
    """Where the body of a call ends, and where its closing mark does: at the same place without one.

    A mark inside of CDATA is text, as far as the CDATA is closed.
    """
    last = text.rfind("]]>")
    for mark in _MARKS.finditer(text, at):
        if mark.start() < at:
            continue
        if mark[0] == _CLOSING:
            return mark.span()
        if mark[0] == "<function ":
            return mark.start(), mark.start()
        if mark.end() <= last:
            at = text.index("]]>", mark.end()) + 3
    return len(text), len(text)
