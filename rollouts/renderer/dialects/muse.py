"""The dialect of Muse: messages to recipients; a message to a tool has its call in tags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import Reply
from rollouts.renderer.dialects.minimax import MiniMax, invoke_pattern, parameter_pattern
from rollouts.renderer.dialects.sections import section

__all__ = ["Muse"]

_HEADER = re.compile(r"(?:<\|start\|>\s*assistant)?[^\S\n]*(?:to=(?P<to>[^\s<]+))?[^\S\n]*<\|message\|>")
_END = re.compile(r"<\|eom\|>|<\|eot\|>|\Z")
_SHOWN = ("user", "commentary", "developer")


class _Calls(MiniMax):
    """The calls in the body of one message."""

    name = "muse"
    marks = ("<atem:function_calls>", "<atem:invoke ")
    block = section("<atem:function_calls>", "</atem:function_calls>", "<atem:invoke ")
    call = invoke_pattern("atem:invoke")
    closing = "</atem:invoke>"
    parameter = parameter_pattern("atem:parameter")
    reasoning = ("<|message|>", "<|message|>")
    """Marks that no body contains: a thought is a message."""


_CALLS = _Calls()


class Muse:
    """``to=f<|message|><atem:function_calls><atem:invoke name="f"><atem:parameter name="key">value</atem:parameter>…``.

    A message to ``self`` is a thought; a call quoted there or in an answer is text. Strings and numbers have no
    quotation marks: their types come from the tool's schema.
    """

    name: ClassVar[str] = "muse"
    reasoning: ClassVar[tuple[str, str]] = (" to=self<|message|>", "<|eom|>")

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        thoughts: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        for recipient, body in _messages(text):
            if recipient in ("self", ""):
                thoughts.append(body)
            elif recipient is None or recipient in _SHOWN:
                content.append(body)
            else:
                reply = _CALLS.parse(body, tools=tools, reasoning_open=False)
                content.append(reply.content)
                calls += reply.tool_calls
        if not thoughts and not calls and len(content) == 1:
            return Reply(content[0])
        return Reply(
            content="\n".join(part.strip() for part in content if part.strip()),
            reasoning="\n".join(thought.strip() for thought in thoughts) if thoughts else None,
            tool_calls=tuple(calls),
        )


def _messages(text: str) -> Iterator[tuple[str | None, str]]:
    """The messages with their recipients: ``""`` without one, ``None`` for text outside of messages."""
    at = 0
    while at < len(text):
        header = _HEADER.search(text, at)
        if header is None:
            yield None, text[at:]
            return
        if header.start() > at:
            yield None, text[at : header.start()]
        end = _END.search(text, header.end())
        assert end is not None
        yield header["to"] or "", text[header.end() : end.start()]
        at = max(end.end(), header.end())
