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

_BODY = "<|message|>"
_END = re.compile(r"<\|eom\|>|<\|eot\|>|\Z")
_BLANK = " \t\r\f\v"
_SHOWN = ("user", "commentary", "developer")


class _Calls(MiniMax):
    """The calls in the body of one message.

    The template offers a tool ``f`` as ``f.f``, and servers run a call of that name as ``f`` (SGLang 0.5.23,
    function_call/muse_glimmer_detector.py).
    """

    name = "muse"
    marks = ("<atem:function_calls>", "<atem:invoke ")
    block = section("<atem:function_calls>", "</atem:function_calls>", "<atem:invoke ")
    call = invoke_pattern("atem:invoke")
    closing = "</atem:invoke>"
    parameter = parameter_pattern("atem:parameter")
    reasoning = ("<|message|>", "<|message|>")
    """Marks that no body contains: a thought is a message."""

    def tool_of(self, written: str, tools: Sequence[Tool]) -> str:
        half = written[: len(written) // 2]
        doubled = bool(half) and written == f"{half}.{half}"
        return half if doubled and all(tool.name != written for tool in tools) else written


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
    while (mark := text.find(_BODY, at)) >= 0:
        before, recipient = _header(text[at:mark])
        if before:
            yield None, before
        end = _END.search(text, mark + len(_BODY))
        assert end is not None
        yield recipient, text[mark + len(_BODY) : end.start()]
        at = end.end()
    if at < len(text):
        yield None, text[at:]


def _header(text: str) -> tuple[str, str]:
    """The text before the header of a message, and the recipient in the header; a header may be empty."""
    before, _, recipient = text.rstrip(_BLANK).rpartition("to=")
    if not recipient or "to=" not in text or re.search(r"[\s<]", recipient):
        before, recipient = text, ""
    before = before.rstrip(_BLANK)
    role = before.removesuffix("assistant").rstrip()
    return (
        role.removesuffix("<|start|>") if before.endswith("assistant") and role.endswith("<|start|>") else before
    ), recipient
