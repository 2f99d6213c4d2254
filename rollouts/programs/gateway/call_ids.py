"""The ids of the tool calls of one session: the ids that the program gets, and the ids that the model wrote.

Invariant: an id that the program gets names one call of the session, whatever the model writes and however many
branches grow at the same time. It begins as the ids of its API do: clients rewrite others (agno 3.1.10,
utils/message.py: PROVIDER_TOOL_ID_CONFIG). Rendered messages have the ids that the model wrote, or ids of nine letters
and digits, which every chat template takes.

Pure; this module knows no token.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import attrs

from rollouts.dtypes import Message, ToolCall

__all__ = ["CallIds"]

_DIGITS = string.digits + string.ascii_lowercase


class CallIds:
    """The ids of one session."""

    def __init__(self) -> None:
        self._given = 0
        self._written: dict[str, str] = {}
        """The id that the model wrote, by the id that the program got."""

    def give(self, reply: Message, prefix: str = "") -> tuple[Message, Message]:
        """The reply as it is rendered, with the model's ids if it wrote any, and as the program gets it.

        Args:
            reply: with the ids that the model wrote, or empty ones.
            prefix: the beginning of the ids that the program gets.
        """
        if not reply.tool_calls:
            return reply, reply
        rendered: list[ToolCall] = []
        served: list[ToolCall] = []
        used: set[str] = set()
        for call in reply.tool_calls:
            plain = f"c{_base36(self._given):0>8}"
            self._given += 1
            written = call.id if call.id and call.id not in used else plain
            given = prefix + plain
            used.add(written)
            if written != given:
                self._written[given] = written
            rendered.append(attrs.evolve(call, id=written))
            served.append(attrs.evolve(call, id=given))
        return attrs.evolve(reply, tool_calls=rendered), attrs.evolve(reply, tool_calls=served)

    def as_written(self, messages: list[Message]) -> list[Message]:
        """The messages of a program with the ids that the model itself wrote into its calls."""
        return [self._as_written(message) for message in messages] if self._written else messages

    def _as_written(self, message: Message) -> Message:
        if message.tool_call_id is not None:
            message = attrs.evolve(message, tool_call_id=self._id(message.tool_call_id))
        if message.tool_calls:
            calls: Sequence[ToolCall] = [attrs.evolve(call, id=self._id(call.id)) for call in message.tool_calls]
            message = attrs.evolve(message, tool_calls=calls)
        return message

    def _id(self, given: str) -> str:
        return self._written.get(given, given)


def _base36(number: int) -> str:
    digits = ""
    while number or not digits:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
