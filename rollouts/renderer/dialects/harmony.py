"""The dialect of gpt-oss, as text: channel ``analysis`` is reasoning, a recipient makes a call, the rest is content.

``openai-harmony`` is not used: it parses ids with a vocabulary that it downloads, and rejects the whole reply at the
first error, while the model needs an error message for it. It is the reference in the tests: replies that it accepts
parse the same here (a recipient without ``to=`` aside), and no call that it rejects ever runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import Reply
from rollouts.renderer.dialects.json import MalformedCallError, checked_arguments, json_value, unreadable

__all__ = ["Harmony"]

_START, _MESSAGE = "<|start|>assistant", "<|message|>"
_END = re.compile(r"<\|(?:end|call|return)\|>|\Z")
_HEADER = re.compile(
    r"\s*(?:to=(?P<first>[^\s<]+))?\s*(?:<\|channel\|>(?P<channel>[^\s<]+))?(?:\s+to=(?P<second>[^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?[^\s<=]*\s*"
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Harmony:
    """``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}``, ended by ``<|call|>``.

    The stop token is not part of the text, so a cut call is recognised only by its incomplete JSON. A message ends only
    at its mark: a call inside an analysis message is reasoning.
    """

    name: ClassVar[str] = "harmony"

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        thoughts: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        at = len(_START) if text.startswith(_START) else 0
        while (body := text.find(_MESSAGE, at)) >= 0:
            head, begin = text[at:body], at
            body += len(_MESSAGE)
            end = _END.search(text, body)
            assert end is not None
            header = _HEADER.fullmatch(head)
            recipient = _RECIPIENT.search(head)
            if recipient is not None:
                calls.append(_call(recipient[1], header, text[body : end.start()], text[begin : end.end()]))
            elif "<|channel|>analysis" in head:
                thoughts.append(text[body : end.start()])
            else:
                content += [] if header else [head]
                content.append(text[body : end.start()])
            at = text.find(_START, end.end())
            content.append(text[end.end() : at if at >= 0 else len(text)])
            if at < 0:
                at = len(text)
                break
            at += len(_START)
        if not (thoughts or calls or content):
            return Reply(text)
        content.append(text[at:])
        return Reply(
            content="\n".join(part.strip() for part in content if part.strip()),
            reasoning="\n".join(thought.strip() for thought in thoughts) if thoughts else None,
            tool_calls=tuple(calls),
        )


def _call(name: str, header: re.Match[str] | None, body: str, raw: str) -> ToolCall:
    try:
        if header is None or (header["first"] and header["second"]):
            raise MalformedCallError(f"its header must be <|channel|>commentary to=functions.{name} <|constrain|>json")
        return ToolCall(name, checked_arguments(json_value(body)), raw=raw)
    except MalformedCallError as error:
        return unreadable(raw, error, name)
