"""The switches of a chat template: texts in earlier messages that change what it writes between later replies.

Invariant: no list of known switches. Each string constant of the template is tried as the text of an earlier message,
and is a switch if the text after a later reply changes. This module does not know token ids or model families.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import Kept, bridge_text, short, whole, with_kept
from rollouts.renderer.template import ChatTemplate

__all__ = ["PROBE", "Switches"]

PROBE = Tool("probe", "Probes.", {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}})
_CALL = ToolCall("probe", {"x": "1"}, id="call00000")
_CALLING = Message("assistant", tool_calls=(_CALL,))
_SAID = Message("assistant", "A")
_PLAIN = "U"


class Switches:
    """The switches of one template.

    Args:
        template: the chat template.
        stops: the stop tokens, as text.
    """

    def __init__(self, template: ChatTemplate, stops: Sequence[str]) -> None:
        self._template = template
        self._stops = tuple(stops)

    def found(self, message: Message) -> tuple[str, ...]:
        """The switches that a message contains."""
        return tuple(text for text in self.texts if text in message.text)

    def probes(self, system: Sequence[Message], kept: Kept) -> list[str | None]:
        """The texts after later replies in a conversation with these messages; ``None`` where the template raises."""
        history = [*system, *with_kept(short, kept)(())]
        later = [*history, _SAID, Message("user", _PLAIN)]
        user, result = _NEWS
        cases = [(user, ()), (user, (PROBE,)), (result, (PROBE,))]
        return [self._bridge(start, new, tools) for start in (history, later) for new, tools in cases]

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The switches, found by trying each constant alone, then each after a switch already found.

        The second pass finds a switch that restores the default, and so has no effect alone.
        """
        found = self._found(self._template.constants, ())
        others = [text for text in self._template.constants if text not in found]
        return (*found, *dict.fromkeys(text for switch in found for text in self._found(others, (switch,))))

    def _found(self, texts: Sequence[str], earlier: Sequence[str]) -> list[str]:
        plain = self._effects(_PLAIN, earlier)
        return [text for text in texts if _differ(self._effects(text, earlier), plain)]

    def _effects(self, text: str, earlier: Sequence[str]) -> list[str | None]:
        """The texts after a reply in conversations with this text; ``None`` where the template raises."""
        start = [turn for each in earlier for turn in (Message("user", each), Message("assistant", "A"))]
        news = [(new, (PROBE,) if new.role == "tool" else ()) for new in _NEWS]
        return [self._bridge([*start, *history], *new) for history in _histories(text) for new in news]

    def _bridge(self, history: Sequence[Message], new: Message, tools: Sequence[Tool]) -> str | None:
        reply = _CALLING if new.role == "tool" else _SAID
        try:
            return bridge_text(self._template, whole, [*history, reply], [new], tools, self._stops)
        except ConfigError:
            return None


_NEWS = (Message("user", "N"), Message("tool", "N", tool_call_id=_CALL.id, name=_CALL.name))


def _histories(text: str) -> Iterator[list[Message]]:
    user, other = Message("user", text), Message("user", _PLAIN)
    yield [user]
    yield [user, Message("assistant", "A"), other]
    result = Message("tool", text, tool_call_id=_CALL.id, name=_CALL.name)
    yield [other, _CALLING, result, Message("assistant", text), other]


def _differ(effects: Sequence[str | None], plain: Sequence[str | None]) -> bool:
    pairs = zip(effects, plain, strict=True)
    return any(effect != other for effect, other in pairs if effect is not None and other is not None)
