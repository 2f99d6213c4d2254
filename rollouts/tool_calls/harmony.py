"""The channels of gpt-oss, as text: analysis is reasoning, a recipient makes a call, the rest is content.

A reader of our own, though ``openai-harmony`` exists: that one reads ids, with a vocabulary which it downloads, and
gives a reply up at its first fault, where the model has to be told of it. It is the judge in the tests: what it reads
is read the same here (a recipient without ``to=`` aside), and no call that it refuses ever runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.tool_calls.base import Reply
from rollouts.tool_calls.json import MalformedCallError, checked_arguments, json_value, unreadable

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

    That stop token is not part of the text, so a call that was cut shows only by its JSON. A message ends at its mark
    and nowhere else: a call that is written inside an analysis is a draft.
    """

    name: ClassVar[str] = "harmony"

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        thoughts: list[str] = []
        said: list[str] = []
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
                said += [] if header else [head]
                said.append(text[body : end.start()])
            at = text.find(_START, end.end())
            said.append(text[end.end() : at if at >= 0 else len(text)])
            if at < 0:
                at = len(text)
                break
            at += len(_START)
        if not (thoughts or calls or said):
            return Reply(text)
        said.append(text[at:])
        return Reply(
            content="\n".join(part.strip() for part in said if part.strip()),
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
