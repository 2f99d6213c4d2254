"""The dialect of Inkling: messages of the model, whose kind a special token says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import Reply
from rollouts.renderer.dialects.json import MalformedCallError, call_in_json, json_value, name_in, unclosed, unreadable

__all__ = ["Inkling"]

_KIND = re.compile(r"<\|content_(?P<kind>text|thinking|invoke_tool_json|invoke_tool_text)\|>")
_BEGIN = "<|message_model|>"
_END = "<|end_message|>"
_LAST = "<|content_model_end_sampling|>"


class Inkling:
    """``<|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {...}}<|end_message|>``.

    ``<|content_thinking|>`` begins a thought, ``<|content_text|>`` an answer.
    """

    name: ClassVar[str] = "inkling"
    reasoning: ClassVar[tuple[str, str]] = ("<|content_thinking|>", _END)

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        thoughts: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        if reasoning_open:
            thought, _, _ = text.partition(_END)
            thoughts.append(thought)
            at = len(thought) + len(_END)
        while (message := _KIND.search(text, at)) is not None:
            before, author = _author(text[at : message.start()])
            content.append(before)
            begin = at + len(before)
            end = text.find(_END, message.end())
            closed, stop = end >= 0, end if end >= 0 else len(text)
            body = text[message.end() : stop]
            at = stop + len(_END) if closed else stop
            if message["kind"] == "thinking":
                thoughts.append(body)
            elif message["kind"] == "text":
                content.append(body)
            else:
                calls.append(_call(message["kind"], author, body, text[begin:at], closed))
        content.append(text[at:])
        parts = [part.replace(_BEGIN, "").replace(_LAST, "").strip() for part in content]
        if not thoughts and not calls and parts == [text.strip()]:
            return Reply(text)
        return Reply(
            content="\n".join(part for part in parts if part),
            reasoning="\n".join(thought.strip() for thought in thoughts) if thoughts else None,
            tool_calls=tuple(calls),
        )


def _author(text: str) -> tuple[str, str]:
    """The text before the header of a message, and the author in the header."""
    before, _, author = text.rpartition(_BEGIN)
    if _BEGIN not in text or re.search(r"[<\s]", author):
        author = re.split(r"[<\s]", text)[-1]
        before = text[: len(text) - len(author)]
    return before, author


def _call(kind: str, author: str, body: str, raw: str, closed: bool) -> ToolCall:
    name = name_in(body) or author
    try:
        if not closed:
            return unclosed(raw, _END, name)
        if kind == "invoke_tool_text":
            raise MalformedCallError('the arguments must be JSON: {"name": ..., "args": {...}}')
        return call_in_json(json_value(body), raw, arguments="args")
    except MalformedCallError as error:
        return unreadable(raw, error, name)
