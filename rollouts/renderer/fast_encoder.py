"""Encoding with ``fastokens`` instead of ``tokenizers``, where both give the same ids.

Invariant: its ids equal the tokenizer's ids. A tokenizer that ``fastokens`` does not load, or whose ids for hard and
random texts differ, has no fast encoder; text on which it raises is encoded by the tokenizer.

This module does not know messages or templates.
"""

from __future__ import annotations

import random
import threading
import unicodedata
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import fastokens

from rollouts.dtypes import TokenColumn
from rollouts.dtypes.lazy_numpy import np

__all__ = ["FastEncoder", "Loader", "loader"]

_MAX_MARKS = 64
"""Maximum number of added tokens in the hard texts."""


class FastEncoder:
    """The fast encoder of a tokenizer. Made by :meth:`of`; may be used from many threads.

    Each thread that encodes keeps about 17 MB.
    """

    def __init__(self, raw: Any) -> None:
        self.vocab_size: int = raw.get_vocab_size()
        added = raw.get_added_tokens_decoder()
        self._next_id: int = max([raw.get_vocab_size(False), *(last + 1 for last in added)])
        """The id of the next token that is added to the tokenizer."""
        self._fast = fastokens.Tokenizer.from_json_str(raw.to_str())
        self._fast.no_truncation()  # state of the last call of its wrapper
        self._fast.no_padding()

    def __repr__(self) -> str:
        return f"<FastEncoder: {self.vocab_size} tokens>"

    @classmethod
    def of(cls, raw: Any) -> FastEncoder | None:
        """The encoder of a tokenizer of the ``tokenizers`` library; ``None`` if it does not load, or differs."""
        if raw.encode_special_tokens:  # not part of its description
            return None
        try:
            made = cls(raw)
        except Exception:  # noqa: BLE001 - it raises several types for a tokenizer that it cannot load
            return None
        marks = [token.content for token in raw.get_added_tokens_decoder().values()]
        marks = [mark for mark in marks if mark][:_MAX_MARKS]
        texts = [*hard_texts(marks), *random_texts(raw, marks)]
        for text, expected in zip(texts, raw.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            found = made.encode(text)
            if found is None or found.tolist() != expected.ids:
                return None
        return made

    def lacks_tokens(self, raw: Any) -> bool:
        """Whether tokens were added to the tokenizer since this encoder was made.

        One id is looked up: with tokenizers 0.22, ``get_vocab_size`` copies the vocabulary, which takes 27 ms or more.
        """
        return raw.id_to_token(self._next_id) is not None

    def encode(self, text: str) -> TokenColumn | None:
        """Ids of text; int32, read-only. ``None`` if the tokenizer must encode it.

        Special tokens in the text become their ids.
        """
        try:
            ids, _ = self._fast.encode_batch_flat([text], add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - or a panic: the tokenizer encodes this text, or raises
            return None
        return np.frombuffer(ids, np.int32)


_LOCK = threading.Lock()


class Loader:
    """Loads the fast encoder of a tokenizer when it is first called."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.begun: Future[FastEncoder | None] | None = None

    def __call__(self) -> Future[FastEncoder | None]:
        """The encoder, loaded once in a separate thread.

        It takes one to three seconds of CPU for a vocabulary of 150,000 tokens, most without the interpreter lock.
        """
        with _LOCK:
            if self.begun is None:
                self.begun = Future()
                threading.Thread(target=_load, args=(self._raw, self.begun), name="fastokens").start()
            return self.begun


# The key is the tokenizer of transformers, because objects of the library tokenizers have no weak references before
# 0.23. A loader does not refer to it, so both are freed together.
_LOADERS: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()


def loader(tokenizer: Any) -> Loader:
    """The loader of a fast tokenizer of transformers: the same one for the same tokenizer."""
    with _LOCK:
        found = _LOADERS.get(tokenizer)
        if found is None:
            found = _LOADERS[tokenizer] = Loader(tokenizer.backend_tokenizer)
    return found


def _load(raw: Any, future: Future[FastEncoder | None]) -> None:
    try:
        future.set_result(FastEncoder.of(raw))
    except BaseException:  # noqa: BLE001 - a panic of the library
        future.set_result(None)


def hard_texts(marks: list[str]) -> list[str]:
    """Texts on which two encoders of one tokenizer may differ; ``marks`` are its added tokens."""
    between = [f"{one}{text}{two}" for text in _HARD[:6] for one, two in zip(marks, marks[::-1], strict=True)]
    around = [text for mark in marks for text in (mark, f" {mark} ", f"x{mark}\n", f"{mark[:-1]} {mark[1:]}")]
    return [*_HARD, *between, *around]


def random_texts(raw: Any, marks: list[str]) -> list[str]:
    """200 texts of vocabulary, scripts, combining signs and added tokens; the same for the same tokenizer.

    Half of them have one token a line, so that a lost merge is noticed: all tokens of a vocabulary of up to 5,000, and
    a sample of a larger one. In the others, tokens are mixed with scripts, signs and marks.
    """
    rng = random.Random(0)
    ids = list(range(raw.get_vocab_size(False)))
    rng.shuffle(ids)
    words = raw.decode_batch([[id] for id in ids[: _ALONE * _WORDS]], skip_special_tokens=False)
    pieces = [words[number::_ALONE] for number in range(_ALONE)]
    alone = ["\n".join(piece) for piece in pieces]
    return [*alone, *("".join(_mixed(rng, piece[:_MIXED], marks)) for piece in pieces)]


def _mixed(rng: random.Random, words: list[str], marks: list[str]) -> Iterator[str]:
    """Each word with what may follow it: letters of a script with combining signs, white space, a mark."""
    for word in words or [""] * _MIXED:
        yield word
        kind = rng.random()
        if kind < 0.3:
            yield rng.choice((" ", "\n", "  ", " \n", "\t", "'", "1"))
        elif kind < 0.6:
            first, last = rng.choice(_SCRIPTS)
            for _ in range(rng.randint(1, 4)):
                yield chr(rng.randint(first, last))
                if rng.random() < 0.4:
                    yield chr(rng.randint(*rng.choice(_COMBINING)))
        elif kind < 0.7 and marks:
            yield rng.choice(marks)


_ALONE, _WORDS, _MIXED = 100, 50, 25
_SCRIPTS = (
    (0x41, 0x7A),
    (0xC0, 0x24F),
    (0x370, 0x3FF),
    (0x400, 0x52F),
    (0x5D0, 0x5EA),
    (0x620, 0x6D3),
    (0x904, 0x96F),
    (0xE01, 0xE5B),
    (0x1100, 0x11FF),
    (0x3041, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1F6FF),
    (0x2000, 0x2BFF),
)
_COMBINING = ((0x300, 0x36F), (0x591, 0x5BD), (0x64B, 0x65F), (0x93E, 0x94D), (0xE31, 0xE3A), (0x20D0, 0x20DC))
"""The first and the last character of scripts, and of signs that combine with the letter before them."""

_LETTERS = "".join(chr(code) for code in range(0xA0, 0x250))
_HARD = [
    "It's 12345.67 o'clock;  DON'T\n\n  go \t there!\r\n\r\n\tdef f(x):\n        return {'a': [1, 2]}   \n",
    "“Déjà vu” – it’s ÉTÉ… x ≠ y → ✓ │ 😀a É'sé'S×÷\n—\n/ÀB ﬁ ſ ŉ K Å ½²",
    " 你好，世界！ 東京 カタカナ한국어 ไทย हिन्दी العربية עברית 👨‍👩‍👧‍👦 🇩🇪 ✊🏽",
    unicodedata.normalize("NFD", "Éàü ñ Å 한글 が") + " a\u0301\u0323 \u200b\u200d\ufeff\u2028\u00ad",
    "'s'S'll'LL'x 's 'RE've'VE CamelCaseWORDSand123numbers456/path/to//\n///x <|im_ end|> <tool_call",
    "\x00\x01\x0b\x0c\x1c\x1d\x1e\x1f\x7f\x85\xa0\u1680\u3000 1\u0660\u0969٣ Ⅷ ①",
    *(
        " ",
        "  ",
        "   x",
        "\n",
        " \n \n",
        "x \n",
        "\r\n",
        "\t\tx",
        "",
        "!!!\n\n!",
        "a" * 300,
        " " * 100,
        "1" * 50,
        "é" * 90,
    ),
    "".join(map(chr, range(128))),
    "".join(chr(a) + chr(b) for a in range(128) for b in (10, 32, 65, 97, 48, 39, 47)),
    _LETTERS,
    " ".join(_LETTERS),
]
