"""Compact storage of a sample's records: strings as offsets into the decoded tokens, other values as packed bytes.

Invariant: each value is read back equal to the one stored. The token column is read-only, so decoding it returns the
same string each time; a string that is not an exact part of the response is stored in full.

The text of a sample is twice in its record, in the response and in the messages, and its completions are many small
objects; here they take a few bytes a turn. This module does not know samples or the journal.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs

from rollouts.dtypes import ChatDict, Extras, TokenColumn, VersionSpan
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.training.read_only import recently
from rollouts.trajectory import CompletionRecord

__all__ = ["CompactRecord", "prefix_of", "sizes_of"]

_SHORT = 32
"""Strings with fewer characters are stored in full."""
_TEXTS = ("content", "reasoning_content")


@attrs.frozen(eq=False, repr=False)
class CompactRecord:
    """Strings and records of one sample. Create it with :meth:`of`; each method returns new objects."""

    columns: tuple[Any, Any, Any]
    """The sample's read-only tokens, mask and logprobs; a sample that still has these objects has them unchanged."""
    sizes: tuple[int, int, int]
    """As :func:`sizes_of` counts them in the mask."""
    turns: int
    """Number of completions."""
    prefix: tuple[int, int]
    """Tokens of their prompts, and how many of them the server had cached."""
    weight_versions: Collection[str]
    """The versions, in the order of their first token."""
    _first: int
    _decode: Callable[[TokenColumn], str]
    _others: tuple[str, ...]
    """Long strings that are not part of the response."""
    _messages: bytes
    _completions: bytes
    _extras: tuple[Extras | None, ...]
    """The extras of the completions, as they are: they may be large arrays. Empty if no completion has any."""
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
        """Store the strings and records of a sample.

        Args:
            columns: tokens, mask and logprobs, all read-only.
            first: offset of the response in the tokens.
            decode: deterministic, from ids to text.
            response: the string that ``decode`` returned for the ids from ``first`` on.
            messages: chat dicts.
            completions: the completions of the replies.
            versions: policy versions of the sampled tokens.

        Returns:
            ``None`` if a message contains a value that cannot be pickled.
        """
        others: list[str] = []
        chats = [dict(message) for message in messages]
        position = 0
        for chat in chats:
            for name in _TEXTS:
                if name not in chat or type(text := chat[name]) is not str or len(text) < _SHORT:
                    continue
                start = response.find(text, position)
                if start < 0:
                    chat[name] = len(others)
                    others.append(text)
                else:
                    position = start + len(text)
                    chat[name] = (start, position)
        try:
            packed = pickle.dumps(chats, 5)
        except Exception:  # noqa: BLE001 - a user's value in a message
            return None
        compact = cls(
            columns,
            sizes_of(columns[1]),
            len(completions),
            prefix_of(completions),
            (*{span.version: None for span in versions},),
            first,
            decode,
            tuple(others),
            packed,
            pickle.dumps([_FIELDS(completion) for completion in completions], 5),
            tuple(extras) if any(extras := [completion.extras for completion in completions]) else (),
            pickle.dumps([(span.version, span.start, span.stop) for span in versions], 5),
        )
        recently((compact, "response"), lambda: response)
        return compact

    def response(self) -> str:
        """Text of the tokens from the first sampled one on."""
        return recently((self, "response"), lambda: self._decode(self.columns[0][self._first :]))

    def messages(self) -> list[ChatDict]:
        """The conversation as chat dicts."""
        chats: list[ChatDict] = pickle.loads(self._messages)
        text: str | None = None
        for chat in chats:
            for name in _TEXTS:
                if name not in chat:
                    continue
                offset = chat[name]
                if type(offset) is tuple:
                    text = self.response() if text is None else text
                    chat[name] = text[slice(*offset)]
                elif type(offset) is int:
                    chat[name] = self._others[offset]
        return chats

    def completions(self) -> list[CompletionRecord]:
        """The completions of the replies."""
        stored: list[Any] = pickle.loads(self._completions)
        extras = self._extras or (None,) * len(stored)
        return [CompletionRecord(*(*fields, extra)) for fields, extra in zip(stored, extras, strict=True)]

    def versions(self) -> list[VersionSpan]:
        """Policy versions of the sampled tokens."""
        return [VersionSpan(*span) for span in pickle.loads(self._versions)]


def sizes_of(mask: npt.NDArray[np.bool_]) -> tuple[int, int, int]:
    """The number of all tokens, of the sampled ones, and of those from the first sampled one on."""
    sampled = int(np.count_nonzero(mask))
    return mask.size, sampled, mask.size - int(mask.argmax()) if sampled else 0


def prefix_of(completions: Sequence[CompletionRecord]) -> tuple[int, int]:
    """The tokens of their prompts, and of those the cached ones."""
    prompts = cached = 0
    for one in completions:
        prompts, cached = prompts + one.start, cached + one.cached_tokens
    return prompts, cached


_FIELDS = operator.attrgetter(*(field.name for field in attrs.fields(CompletionRecord) if field.name != "extras"))
