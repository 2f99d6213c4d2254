"""Special tokens written in the text of users and tools.

Invariant: with ``as_text``, no part of a user or tool message becomes a special token. A guard, a character that UTF-8
text cannot contain, breaks each mark before the template is rendered. The encoder removes it and encodes the mark as
plain text. This module does not know conversations.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import attrs

from rollouts.dtypes import Image, Message
from rollouts.errors import ConfigError

__all__ = ["GUARD", "Marks", "SpecialText", "plain_encoder"]

SpecialText: TypeAlias = Literal["as_ids", "as_text", "error"]
"""The encoding of special tokens in the text of users and tools: as their ids (as transformers and servers do), as
plain text, or not at all."""

GUARD = "\udfff"
"""A lone surrogate: UTF-8 has no form of it, so no text that can be encoded contains it."""


class Marks:
    """The texts of special tokens.

    Args:
        texts: the texts.
        mode: how they are encoded in user and tool messages.
    """

    def __init__(self, texts: Iterable[str], mode: SpecialText) -> None:
        known = sorted({text for text in texts if len(text.strip()) > 1}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._guarded = re.compile("|".join(re.escape(text[0] + GUARD + text[1:]) for text in known) or r"(?!)")
        self._mode = mode

    def guarded(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with a guard in each mark of a user or tool message.

        Raises:
            ConfigError: there is a mark, and the mode is ``error``.
        """
        return messages if self._mode == "as_ids" else [self._guard(message) for message in messages]

    def _guard(self, message: Message) -> Message:
        if message.role not in ("user", "tool"):
            return message
        if not isinstance(message.content, str):
            message = attrs.evolve(message, content=_joined(message.content))
        return message.with_texts(lambda text: self.guarded_text(text, f"content of a {message.role} message"))

    def guarded_text(self, text: str, what: str) -> str:
        """Return text of a user or tool with a guard in each mark.

        Raises:
            ConfigError: there is a mark, and the mode is ``error``; the message names ``what``.
        """
        found = None if self._mode == "as_ids" else self._pattern.search(text)
        if found is None:
            return text
        if self._mode == "error":
            expected = 'no special token (special_text="error"; "as_text" encodes it as plain text, "as_ids" as its id)'
            raise ConfigError.of(what, found[0], expected)
        return self._pattern.sub(lambda mark: mark[0][0] + GUARD + mark[0][1:], text)

    def without(self, text: str) -> str:
        """Return text that quotes a reply, without the marks that :meth:`guarded_text` would refuse."""
        return self._pattern.sub("…", text) if self._mode == "error" else text

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Split a rendered text; yield each part without guards, and whether it is a mark to encode as plain text."""
        at = 0
        for found in self._guarded.finditer(text):
            yield text[at : found.start()].replace(GUARD, ""), False
            yield found[0].replace(GUARD, ""), True
            at = found.end()
        yield text[at:].replace(GUARD, ""), False


def _joined(content: Sequence[str | Image]) -> list[str | Image]:
    """Content with adjacent texts as one: a mark may begin in one text and end in the next."""
    runs = itertools.groupby(content, lambda part: isinstance(part, str))
    return [part for are_texts, run in runs for part in (["".join(map(str, run))] if are_texts else run)]


def plain_encoder(raw: object) -> Callable[[str], list[int]]:
    """Return a function that encodes text with the model of a raw tokenizer, which does not know special tokens."""
    model, normalizer, splitter = (getattr(raw, name) for name in ("model", "normalizer", "pre_tokenizer"))

    def encode(text: str) -> list[int]:
        text = text if normalizer is None else normalizer.normalize_str(text)
        words = [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]
        return [int(token.id) for word in words for token in model.tokenize(word)]

    return encode
