"""The dialect of Gemma 4: ``key:value`` pairs, with a special token as quotation mark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import MalformedCallError, json_prefix, unclosed, unreadable

__all__ = ["Gemma"]

_QUOTE = '<|"|>'
_KEYS = {
    quote: re.compile(
        rf'\s*(?:{re.escape(quote)}(?P<quoted>.*?){re.escape(quote)}|(?P<bare>[^\s:,{{}}\[\]<>"]+))\s*:', re.DOTALL
    )
    for quote in (_QUOTE, "<escape>")
}
_MAX_DEPTH = 100


class Gemma(BlockDialect):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,count:3}<tool_call|>``; bare keys, quoted strings.

    A subclass has other marks, another quotation mark, or takes the types of values from elsewhere.
    """

    name = "gemma"
    marks = ("<|tool_call>",)
    block = re.compile(r"<\|tool_call>(?P<body>.*?)(?:(?P<close><tool_call\|>)|(?=<\|tool_call>)|\Z)", re.DOTALL)
    reasoning = ("<|channel>thought", "<channel|>")
    head: ClassVar[re.Pattern[str]] = re.compile(r"\s*call:(?P<name>[^\s{}<]+)(?P<arguments>\{|<\|\"\|>)?")
    """The name of a call and the opening mark of its arguments, which may be missing."""
    form: ClassVar[str] = "call:name"
    """As errors show the begin of a call."""
    closing: ClassVar[str] = "<tool_call|>"
    quote: ClassVar[str] = _QUOTE
    """The mark on both sides of a string."""

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        body = block["body"]
        head = self.head.match(body)
        name = head["name"] if head else ""
        try:
            if block["close"] is None:
                return [unclosed(block[0], self.closing, name)]
            if head is None:
                opening = block.string[block.start() : block.start("body")]
                raise MalformedCallError(f"{self.form} must follow {opening}", "no_name")
            if head["arguments"] is None:
                raise MalformedCallError("the arguments are missing; write {} when the tool takes none", "no_arguments")
            if head["arguments"] == self.quote:
                raise MalformedCallError("the arguments are a string; write {key:value}", "string_arguments")
            arguments, end = _fields(body, head.end(), self.quote, 1)
            if body[end:].strip():
                expected = f"nothing may stand between the arguments and {self.closing}"
                raise MalformedCallError(expected, "bad_arguments")
            arguments = self.typed(arguments, name, tools)
        except MalformedCallError as error:
            return [unreadable(block[0], error, name)]
        return [ToolCall(name, arguments, raw=block[0])]

    def typed(self, arguments: dict[str, Any], name: str, tools: Sequence[Tool]) -> dict[str, Any]:
        """The arguments with the types that the notation gives them."""
        return arguments


def _value(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    """Parse the value that begins at ``at``; return it with its end position."""
    at = _skip(text, at)
    if depth > _MAX_DEPTH:
        raise MalformedCallError(f"the arguments are nested deeper than {_MAX_DEPTH}", "bad_arguments")
    if text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        if end < 0:
            raise MalformedCallError(f"{quote} is missing behind a string", "bad_arguments")
        return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return _fields(text, at + 1, quote, depth + 1)
    if text.startswith("[", at):
        return _items(text, at + 1, quote, depth + 1)
    if text.startswith('"', at):
        raise MalformedCallError(f"strings stand between {quote}, not between quotation marks", "bad_arguments")
    try:
        return json_prefix(text, at)  # a number, true, false, null
    except MalformedCallError as error:
        excerpt = re.match(r"[^,}\]]*", text[at : at + 40])
        reason = f"{excerpt[0] if excerpt else ''!r} is not a value: strings stand between {quote}"
        raise MalformedCallError(reason, "bad_arguments") from error


def _fields(text: str, at: int, quote: str, depth: int) -> tuple[dict[str, Any], int]:
    fields: dict[str, Any] = {}
    while not text.startswith("}", at := _skip(text, at)):
        if fields:
            at = _comma(text, at, "}")
        key = _KEYS[quote].match(text, at)
        if key is None:
            raise MalformedCallError("an argument is written key:value", "bad_arguments")
        name = key["bare"] if key["quoted"] is None else key["quoted"]
        if name in fields:
            raise MalformedCallError(f'the key "{name}" is given more than once', "bad_arguments")
        fields[name], at = _value(text, key.end(), quote, depth)
    return fields, at + 1


def _items(text: str, at: int, quote: str, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while not text.startswith("]", at := _skip(text, at)):
        if items:
            at = _comma(text, at, "]")
        item, at = _value(text, at, quote, depth)
        items.append(item)
    return items, at + 1


def _comma(text: str, at: int, closing: str) -> int:
    if not text.startswith(",", at):
        raise MalformedCallError(f"a comma or {closing} must follow a value", "bad_arguments")
    return at + 1


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
