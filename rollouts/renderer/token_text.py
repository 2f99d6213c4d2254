"""The text of each token of a sequence.

Invariant: the texts, joined, equal the text that the tokenizer decodes from all tokens. A character that several
tokens spell belongs to the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["TokenTexts"]

Decode = Callable[[Any], str]

_LONGEST_CHARACTER = 8
"""Most tokens that spell one character."""
_BROKEN = "\ufffd"


class TokenTexts:
    """The texts of tokens, by id.

    Args:
        decode: the text of a sequence of ids; ``None`` shows the ids as numbers.
    """

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._usual: dict[int, str] = {}

    def usual(self, token: int) -> str:
        """The text of a token after another token, as far as it does not depend on that token."""
        if self._decode is None:
            return f"⟨{token}⟩"
        text = self._usual.get(token)
        if text is None:
            before = self._decode([token])
            after = self._decode([token, token])
            # Some decoders drop a space at the start.
            text = after[len(before) :] if after.startswith(before) and _BROKEN not in after else before
            self._usual[token] = text
        return text

    def exceptions(self, ids: Sequence[int]) -> dict[int, str]:
        """The positions whose text is not :meth:`usual`, with their text."""
        if self._decode is None or not ids:
            return {}
        usual = [self.usual(token) for token in ids]
        whole = self._decode(ids)
        if "".join(usual) == whole:
            return {}
        texts = self._spelled(ids)
        if "".join(texts) != whole:
            texts = self._by_prefix(ids, whole)
        return {place: text for place, (text, other) in enumerate(zip(texts, usual, strict=True)) if text != other}

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; joined, they are the text of all."""
        exceptions = self.exceptions(ids)
        return [exceptions.get(place, self.usual(token)) for place, token in enumerate(ids)]

    def _spelled(self, ids: Sequence[int]) -> list[str]:
        """The shortest runs of tokens that spell whole characters; the text of a run belongs to its first token."""
        assert self._decode is not None
        texts: list[str] = []
        start = 0
        while start < len(ids):
            stop, text = start + 1, self.usual(ids[start]) if start else self._decode(ids[:1])
            while text.endswith(_BROKEN) and stop < len(ids) and stop - start < _LONGEST_CHARACTER:
                stop += 1
                text = self._decode(ids[start:stop])
            texts += [text, *[""] * (stop - start - 1)]
            start = stop
        return texts

    def _by_prefix(self, ids: Sequence[int], whole: str) -> list[str]:
        """The text that each token adds to the text before it; quadratic, for the few samples that need it."""
        assert self._decode is not None
        texts, written = [], 0
        for stop in range(1, len(ids) + 1):
            text = whole if stop == len(ids) else self._decode(ids[:stop])
            while not whole.startswith(text):  # the last character is not whole yet, or changes with the next token
                text = text[:-1]
            texts.append(text[written:])
            written = max(written, len(text))
        return texts
