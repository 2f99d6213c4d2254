"""The dialects of functionary: a tag with the name (3.1), or recipients (3.2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect, Reply
from rollouts.renderer.dialects.json import (
    MalformedCallError,
    checked_arguments,
    json_prefix,
    unclosed,
    unreadable,
)

__all__ = ["Functionary31", "Functionary32"]

_CLOSING = "</function>"


class Functionary31(BlockDialect):
    """``<function=name>{...}</function>``."""

    name = "functionary_v3_1"
    marks = ("<function=",)
    block = re.compile(r"<function=(?P<name>[^>\n]{0,200})>\s*")

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        text, name = block.string, block["name"].strip()
        following = self.block.search(text, block.end())
        limit = following.start() if following else len(text)
        closing = text.find(_CLOSING, block.end())
        try:
            value, end = json_prefix(text, block.end())
            closing = text.find(_CLOSING, end)
            if text[end : closing if closing >= 0 else limit].strip():
                raise MalformedCallError(f"there is text between the arguments and {_CLOSING}", "bad_arguments")
            if closing < 0:
                return [unclosed(text[block.start() : end], _CLOSING, name)], end
            if not name:
                raise MalformedCallError("the name of a tool is missing", "no_name")
            end = closing + len(_CLOSING)
            return [ToolCall(name, checked_arguments(value), raw=text[block.start() : end])], end
        except MalformedCallError as error:
            if not 0 <= closing < limit:
                return [unclosed(text[block.start() : limit], _CLOSING, name)], limit
            end = closing + len(_CLOSING)
            return [unreadable(text[block.start() : end], error, name)], end


class Functionary32(BlockDialect):
    """``>>>name``, a newline and ``{...}``; ``>>>all`` and text. The prompt ends with the first ``>>>``."""

    name = "functionary_v3_2"
    block = re.compile(
        r"(?:(?:\A|(?<=</think>)\s*)(?=[\w.-]+\n\s*\{)|>>>(?!all\n)(?=[\w.-]*(?:\n|\Z)))(?P<name>[\w.-]*)\s*"
    )

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        text, name = block.string, block["name"]
        try:
            value, end = json_prefix(text, block.end())
            following = text.find(">>>", end)
            after = text[end : following if following >= 0 else len(text)]
            if after.strip():
                raise MalformedCallError(f"there is text after the arguments: {after.strip()[:80]!r}", "bad_arguments")
            if not name:
                raise MalformedCallError("", "no_name")
            return [ToolCall(name, checked_arguments(value), raw=text[block.start() : end])], end
        except MalformedCallError as error:
            nameless = MalformedCallError("the name of a tool and a newline must follow >>>", "no_name")
            next_one = self.block.search(text, block.end())
            end = next_one.start() if next_one else len(text)
            return [unreadable(text[block.start() : end], error if name else nameless, name)], end

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        reply = super().parse(text, tools=tools, reasoning_open=reasoning_open)
        content = re.sub(r"\A(?:>>>)?all\n|>>>all\n", "", reply.content)
        return reply if content == reply.content else Reply(content, reply.reasoning, reply.tool_calls)
