"""What a sample says beside its columns, held small: texts as places in what its tokens say, records as bytes.

Invariant: what is read back is what was given. The text of the tokens is made of the very column that they were in when
it was compared, which nobody can change; a text that does not stand in it word for word is held as it is.

A sample of ten thousand tokens has some ten thousand words twice, in its response and in its messages, and several
hundred small objects in its records; here they cost some bytes each turn. This module knows no sample and no journal.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from rollouts.dtypes import ChatDict, TokenColumn, VersionSpan
from rollouts.trajectory import CompletionRecord

__all__ = ["CompactRecord"]

_SHORT = 32
"""Characters of a text that is not worth a place."""
_TEXTS = ("content", "reasoning_content")


@attrs.frozen(eq=False, repr=False)
class CompactRecord:
    """Made by :meth:`of`; each method gives new objects."""

    columns: tuple[Any, Any, Any]
    """The columns that the sample had: whoever has these same ones still, has them unchanged."""
    turns: int
    """How many completions there are."""
    _first: int
    _decode: Callable[[TokenColumn], str]
    _others: tuple[str, ...]
    """Long texts that do not stand in the response."""
    _messages: bytes
    _completions: bytes
    _versions: bytes

    @classmethod
    def of(
        cls,
        columns: tuple[Any, Any, Any],
        first: int,
        decode: Callable[[TokenColumn], str],
        response: str,
        messages: Sequence[ChatDict],
        completions: Sequence[CompletionRecord],
        versions: Sequence[VersionSpan],
    ) -> CompactRecord | None:
        """Take in what a sample says.

        Args:
            columns: tokens, mask and logprobs, which nobody can change.
            first: where the response begins in the tokens.
            decode: what ids say, always the same.
            response: what it gave for the ids from ``first`` on.
            messages: chat dicts.
            calls: completions.
            versions: spans.

        Returns:
            ``None`` where a message has something in it that cannot be held as bytes.
        """
        others: list[str] = []
        placed: list[ChatDict] = []
        at = 0
        for message in messages:
            chat = dict(message)
            for name in _TEXTS:
                text = chat.get(name)
                if not isinstance(text, str) or len(text) < _SHORT:
                    continue
                start = response.find(text, at)
                if start < 0:
                    chat[name] = len(others)
                    others.append(text)
                else:
                    at = start + len(text)
                    chat[name] = (start, at)
            placed.append(chat)
        try:
            packed = pickle.dumps(placed, 5)
        except Exception:  # noqa: BLE001 - a guest's value in a message
            return None
        told = cls(
            columns,
            len(completions),
            first,
            decode,
            tuple(others),
            packed,
            pickle.dumps([_FIELDS(call) for call in completions], 5),
            pickle.dumps([(span.version, span.start, span.stop) for span in versions], 5),
        )
        _remember(told, response)
        return told

    def response(self) -> str:
        """What the tokens say from the first sampled one on."""
        for told, known in _recent:
            if told is self:
                return known
        text = self._decode(self.columns[0][self._first :])
        _remember(self, text)
        return text

    def messages(self) -> list[ChatDict]:
        """The conversation."""
        chats: list[ChatDict] = pickle.loads(self._messages)
        text: str | None = None
        for chat in chats:
            for name in _TEXTS:
                place = chat.get(name)
                if type(place) is tuple:
                    text = self.response() if text is None else text
                    chat[name] = text[slice(*place)]
                elif type(place) is int:
                    chat[name] = self._others[place]
        return chats

    def completions(self) -> list[CompletionRecord]:
        """The completions."""
        return [CompletionRecord(*fields) for fields in pickle.loads(self._completions)]

    def versions(self) -> list[VersionSpan]:
        """Who sampled what."""
        return [VersionSpan(*span) for span in pickle.loads(self._versions)]


_FIELDS = operator.attrgetter(*(field.name for field in attrs.fields(CompletionRecord)))


_recent: tuple[tuple[CompactRecord, str], ...] = ()
"""Responses that were read last: whoever reads one, reads it twice."""


def _remember(told: CompactRecord, text: str) -> None:
    global _recent  # replaced as a whole, so that threads see the one or the other
    _recent = (*_recent[-1:], (told, text))
