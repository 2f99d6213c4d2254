"""The forms of a renderer's bridges: what the template writes around new messages, by the shape of the conversation.

Invariant: a known form says nothing about a rendering that is not exactly this form with the real texts in it, or whose
texts contain a stop token. Thread-safe. This module does not know templates.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import attrs

from rollouts.dtypes import Message

__all__ = ["BridgeForms", "shape_of"]

_FORMS_KEPT = 1024


@attrs.frozen
class _Form:
    end: str
    """The text before the first new message."""
    after: tuple[str, ...]
    """The text after each new message, in the order in which the template writes them."""
    order: tuple[int, ...]
    """The position of each of these messages among the new ones."""

    def filled(self, texts: Sequence[str]) -> str:
        return self.end + "".join([texts[number] + text for number, text in zip(self.order, self.after, strict=True)])


class BridgeForms:
    """The forms of the latest bridges of one template with the same stop tokens."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, _Form] = {}

    def end(self, shape: Hashable, rest: str, new: Sequence[Message], stops: Sequence[str]) -> str | None:
        """The text before the first new message in ``rest``, the rendering after a turn; ``None`` if it is unknown."""
        form = self._forms.get(shape)
        if form is None:
            return None
        texts = [message.text for message in new]
        if rest != form.filled(texts) and rest != form.filled([text.strip() for text in texts]):
            return None
        has_stop = any(stop in text for text in texts for stop in stops)
        return None if has_stop else form.end

    def keep(self, shape: Hashable, with_words: str, words: Sequence[str]) -> None:
        """Keep the form of a rendering that has a word in the place of each new message."""
        if any(with_words.count(word) != 1 for word in words):
            return
        if len(self._forms) >= _FORMS_KEPT:  # some models write another id in each call
            self._forms.clear()
        order = sorted(range(len(words)), key=lambda number: with_words.index(words[number]))
        end, *after = re.split("|".join(words), with_words)
        self._forms[shape] = _Form(end, tuple(after), tuple(order))


def shape_of(opening: Sequence[Message], turn: Message, new: Sequence[Message], tools: str) -> Hashable:
    """A conversation without its texts, so that others with the same roles, calls and tools have the same shape."""
    roles = "".join([message.role[0] for message in opening])
    calls = tuple([(call.name, call.id) for call in turn.tool_calls])
    return tools, roles, calls, tuple([(message.role, message.name, message.tool_call_id) for message in new])
