"""The channels of gpt-oss, as text: analysis is reasoning, a recipient makes a call, the rest is content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.tool_calls.base import Reply
from rollouts.tool_calls.reading import MalformedCallError, checked_arguments, json_value, unreadable

__all__ = ["Harmony"]

_MESSAGE = re.compile(
    r"(?:\A|<\|start\|>assistant|(?=<\|channel\|>))(?P<head>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*){0,3})<\|message\|>"
    r"(?P<body>.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Harmony:
    """``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}``, ended by ``<|call|>``.

    That stop token is not part of the text, so a call that was cut shows only by its JSON.
    """

    name: ClassVar[str] = "harmony"

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        thoughts: list[str] = []
        said: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        for message in _MESSAGE.finditer(text):
            said.append(text[at : message.start()])
            at = message.end()
            recipient = _RECIPIENT.search(message["head"])
            if recipient:
                calls.append(_call(recipient.group(1), message))
            elif "<|channel|>analysis" in message["head"]:
                thoughts.append(message["body"])
            else:
                said.append(message["body"])
        if at == 0:
            return Reply(text)
        said.append(text[at:])
        return Reply(
            content="\n".join(part.strip() for part in said if part.strip()),
            reasoning="\n".join(thought.strip() for thought in thoughts) if thoughts else None,
            tool_calls=tuple(calls),
        )


def _call(name: str, message: re.Match[str]) -> ToolCall:
    try:
        return ToolCall(name, checked_arguments(json_value(message["body"])), raw=message[0])
    except MalformedCallError as error:
        return unreadable(message[0], error, name)
