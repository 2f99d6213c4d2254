"""The switches of a chat template: texts in earlier messages that change what it writes between later replies.

Invariant: no list of known switches. Each string constant of the template is tried as the text of an earlier message,
and is a switch if the text after a later reply changes. This module does not know token ids or model families.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import bridge_text, whole
from rollouts.renderer.template import ChatTemplate

__all__ = ["Switches"]

_TOOL = Tool("probe", "Probes.", {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}})
_CALL = ToolCall("probe", {"x": "1"}, id="call00000")
_CALLING = Message("assistant", tool_calls=(_CALL,))
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
        self._searched: dict[int, tuple[weakref.ref[Message], bool]] = {}
        self._clean: set[int] = set()
        """The ``id`` of each living message that was searched and contains no switch."""

    def in_message(self, message: Message) -> bool:
        """Whether a message contains a switch; each message is searched once."""
        if not self.texts or id(message) in self._clean:
            return False
        searched = self._searched.get(id(message))
        return self._search(message) if searched is None else searched[1]

    def positions(self, messages: Sequence[Message]) -> list[int]:
        """The positions of the messages that contain a switch."""
        if not self.texts or self._clean.issuperset(map(id, messages)):
            return []
        return [
            at for at, message in enumerate(messages) if id(message) not in self._clean and self.in_message(message)
        ]

    def _search(self, message: Message) -> bool:
        key = id(message)
        held = any(text in message.content for text in self.texts)
        self._searched[key] = (weakref.ref(message, lambda _: self._forget(key)), held)
        if not held:
            self._clean.add(key)
        return held

    def _forget(self, key: int) -> None:
        self._searched.pop(key, None)
        self._clean.discard(key)

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The switches, found by trying each constant alone, then each after one that was found.

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
        return [self._bridge([*start, *history], new) for history in _histories(text) for new in _NEWS]

    def _bridge(self, history: Sequence[Message], new: Message) -> str | None:
        calls = new.role == "tool"
        reply = _CALLING if calls else Message("assistant", "A")
        try:
            return bridge_text(self._template, whole, [*history, reply], [new], (_TOOL,) if calls else (), self._stops)
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
