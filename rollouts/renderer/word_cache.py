"""Encoding word by word, for tokenizers that cut a text into words first: each word is encoded once, then looked up.

Invariant: what it gives is what the tokenizer gives. That is so where nothing looks further than a word: special tokens
and words are cut by the tokenizer's own rules, and byte-pair encoding never looks beyond the word. It is made only of
tokenizers whose every part is known to be of this kind, and only if a list of hard texts comes out the same. It encodes
texts of ASCII, Latin letters with accents, and common punctuation and symbols, on which the rules read the same here as
there; a text with anything else in it is the tokenizer's.

What stands between two special tokens is looked up whole where it comes again and again: the few words of a template,
and the tools and the system prompt with which one conversation after the other begins.

This module knows no messages and counts nothing.
"""

from __future__ import annotations

import array
import functools
import json
import operator
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rollouts.dtypes import TokenColumn
from rollouts.renderer.byte_level import BYTES

__all__ = ["Words"]

_KEPT = 1 << 15
"""Words whose ids are kept; then all are forgotten, and those that are still in use come back first."""
_LONG_WORD = 160
"""Characters; most rules and edges of tables have fewer."""
_LONG_TEXT = 1 << 16
"""Characters between two special tokens from which on the tokenizer works alone: it lets other threads run."""
_SHORT_PART, _SHORT_PARTS = 16, 256
"""Up to so many characters between two special tokens are looked up whole, if they are of the latest: the roles, the
ends of lines."""
_LONG_PART, _LONG_PARTS = 256, 64
"""And from so many characters on, in an opening."""


class Words:
    """Words and their ids. Made by :meth:`of`; may be used from many threads."""

    def __init__(self, raw: Any, words: re.Pattern[str], special: Mapping[str, int]) -> None:
        self._raw = raw
        self._size = raw.get_vocab_size()
        self._model = raw.model
        self._cut = words.findall
        self._special = {"": b""} | {text: _column([number]) for text, number in special.items()}
        longest_first = sorted(special, key=len, reverse=True)
        self._between = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split if special else None
        self._known = dict(self._special)
        self._short = functools.lru_cache(_SHORT_PARTS)(self._encoded)
        self._long = functools.lru_cache(_LONG_PARTS)(self._encoded)

    def __repr__(self) -> str:
        return f"<Words: {len(self._known)} known>"

    @classmethod
    def of(cls, raw: Any) -> Words | None:
        """For a tokenizer of the ``tokenizers`` library; ``None`` where something in it may look beyond a word."""
        words = _word_pattern(_described(raw.pre_tokenizer))
        added = raw.get_added_tokens_decoder()
        options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        flags = ("lstrip", "rstrip", "single_word", "normalized")
        if (
            words is None
            or _described(raw.normalizer) not in _LEAVES_ASCII
            or type(raw.model).__name__ != "BPE"
            or any(getattr(raw.model, option) for option in options)
            or raw.encode_special_tokens
            or any(getattr(token, flag) for token in added.values() for flag in flags)
        ):
            return None
        special = {token.content: number for number, token in added.items() if token.content}
        made = cls(raw, words, special)
        marks = [*special][:8]
        texts = [*_HARD, *(f"{one}{text}{two}" for text in _HARD for one, two in zip(marks, marks[::-1], strict=True))]
        same = (
            (found := made.encode(text)) is not None and found.tolist() == ids.ids
            for text, ids in zip(texts, raw.encode_batch_fast(texts, add_special_tokens=False), strict=True)
        )
        return made if all(same) else None

    def forget(self) -> None:
        """Know no word any more."""
        self._known = dict(self._special)
        self._short.cache_clear()
        self._long.cache_clear()

    def encode(self, text: str, *, opening: bool = False) -> TokenColumn | None:
        """Ids of a text, read-only; ``None`` if it is the tokenizer's to encode.

        Args:
            text: special tokens written in it become their ids.
            opening: whether others will begin as it does: its long parts are kept.
        """
        if self._raw.get_vocab_size() != self._size:  # tokens were added
            return None
        columns: list[bytes] = []
        for place, part in enumerate([text] if self._between is None else self._between(text)):
            if place % 2:
                ids: bytes | None = self._special[part]
            elif len(part) <= _SHORT_PART:
                ids = self._short(part)
            elif opening and len(part) >= _LONG_PART:
                ids = self._long(part)
            else:
                ids = self._encoded(part)
            if ids is None:
                return None
            columns.append(ids)
        return np.frombuffer(b"".join(columns), np.int32)

    def _encoded(self, part: str) -> bytes | None:
        """Ids of what stands between two special tokens; ``None`` if it is the tokenizer's to encode."""
        if len(part) > _LONG_TEXT or not (part.isascii() or _OTHER(part) is None):
            return None
        words = self._cut(part)
        if len("".join(words)) != len(part):
            return None  # what is between two words is a word, too
        try:
            return b"".join(operator.itemgetter("", *words)(self._known))  # all at once
        except KeyError:
            known = self._known.get
            ids = {word: known(word) or self._ids_of(word) for word in dict.fromkeys(words)}
            return b"".join(map(ids.__getitem__, words))

    def _ids_of(self, word: str) -> bytes:
        ids = self._known.get(word)
        if ids is None:
            pieces = self._model.tokenize("".join(map(_AS_TEXT.__getitem__, word.encode())))
            ids = _column([piece.id for piece in pieces])
            if len(word) < _LONG_WORD:
                if len(self._known) >= _KEPT + len(self._special):
                    self._known = dict(self._special)
                self._known[word] = ids
        return ids


def _column(ids: list[int]) -> bytes:
    return array.array("i", ids).tobytes()


_AS_TEXT = {byte: text for text, byte in BYTES.items()}
"""Bytes as byte-level tokenizers write them in their vocabulary."""
_LEAVES_ASCII = (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})
"""Normalizers that change no text of the characters here: none of them is, or takes, a combining one."""
_HARD = [
    "It's 12345.67 o'clock;  DON'T\n\n  go \t there!\r\n\r\n\tdef f(x):\n        return {'a': [1, 2]}   \n",
    " ", "  ", "   x", "\n", " \n \n", "x \n", "\r\n", "\t\tx", "a\x0bb\x0cc\x1cd\x1de\x1ef\x1fg\x7fh\x00i",
    "'s'S'll'LL'x 's 'RE've'VE", "CamelCaseWORDSand123numbers456/path/to//\n///x", "<|im_", "end|>",
    "<tool_call", "!!!\n\n!",
    "“Déjà vu” – it’s ÉTÉ… x ≠ y → ✓ │ 😀a É'sé'S×÷\n—\n/ÀB",
    "".join(map(chr, range(128))), "".join(chr(a) + chr(b) for a in range(128) for b in (10, 32, 65, 97, 48, 39, 47)),
]  # fmt: skip


_ACCENTED = (range(0xC0, 0x149), range(0x14A, 0x17F))
"""Latin letters; without two that are an apostrophe or an s to a rule that ignores case."""
_SIGNS = (
    *(range(0xA1, 0xC0), range(0xD7, 0xF8, 0x20), range(0x2010, 0x2028), range(0x2030, 0x205F), range(0x20A0, 0x20C0)),
    *(range(0x2190, 0x2329), range(0x232B, 0x23FF), range(0x2500, 0x27C0)),
    *(range(0x1F300, 0x1F650), range(0x1F680, 0x1F700), range(0x1F900, 0x1FA00)),
)
"""Punctuation, arrows, mathematics, boxes and pictures, among other things."""


def _of_kind(ranges: Iterable[range], *kinds: str) -> str:
    """The characters of these ranges whose category begins so."""
    return "".join(one for codes in ranges for one in map(chr, codes) if unicodedata.category(one).startswith(kinds))


_UPPER, _LOWER = _of_kind(_ACCENTED, "Lu"), _of_kind(_ACCENTED, "Ll")
_BEYOND_ASCII = _UPPER + _LOWER + _of_kind(_SIGNS, "P", "S")
_OTHER = re.compile(f"[^\\x00-\\x7f{re.escape(_BEYOND_ASCII)}]").search


# -- the rule by which a tokenizer cuts words -------------------------------------------------------------------------


def _described(component: Any) -> Any:
    """What a part of a tokenizer says of itself."""
    return None if component is None else json.loads(component.__getstate__())


def _word_pattern(pre_tokenizer: Any) -> re.Pattern[str] | None:
    """The rule of a pre-tokenizer that cuts with one expression and then writes bytes, for Python."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if isinstance(pre_tokenizer, dict) else []
    byte_level = parts[-1] if parts else {}
    if byte_level.get("type") != "ByteLevel" or byte_level["add_prefix_space"] is not False:
        return None
    if len(parts) == 1 and byte_level["use_regex"]:
        return _translated(_GPT2)
    if len(parts) != 2 or byte_level["use_regex"] or parts[0].get("type") != "Split":
        return None
    split = parts[0]
    expression = split["pattern"].get("Regex")
    return _translated(expression) if (split["behavior"], split["invert"], bool(expression)) == _CUTS else None


_CUTS = ("Isolated", False, True)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a ``ByteLevel`` that cuts by itself cuts with."""
_LETTERS = {"L": f"a-zA-Z{_LOWER}{_UPPER}", "Ll": f"a-z{_LOWER}", "Lu": f"A-Z{_UPPER}"}
_PROPERTIES = {**_LETTERS, "N": "0-9", "Lt": "", "Lm": "", "Lo": "", "M": ""}
"""The characters that have a property, of those that occur here."""
_ELEMENT = re.compile(
    r"\\p\{(?P<property>\w+)\}|(?P<open>\[\^?)|(?P<close>\])|(?P<same>\\[rnsS]|\(\?i:['delmrstv|]+\)|\(\?!|\(\?:|[()|]"
    r"|\{\d(,\d?)?\}|[?*+]\+?|['delmrstv /])"
)
"""What an expression may be made of; case is ignored in what is all ASCII, and nowhere else."""


def _translated(expression: str) -> re.Pattern[str] | None:
    """A tokenizer's expression as one that cuts in the same way what occurs here; ``None`` if a part is not known."""
    written: list[str] = []
    at, inside, empty = 0, False, False
    while at < len(expression):
        element = _ELEMENT.match(expression, at)
        if element is None or (inside and element["same"] and element["same"][0] in "(|?*+{"):
            return None
        at = element.end()
        if element["property"]:
            characters = _PROPERTIES.get(element["property"])
            if characters is None or not (inside or characters):
                return None
            written.append(characters if inside else f"[{characters}]")
            empty = empty and not characters
        else:
            if element["open"]:
                if inside:
                    return None
                inside = empty = True
            elif element["close"]:
                if empty or not inside:
                    return None
                inside = False
            else:
                empty = False
            written.append(element[0])
    return re.compile("".join(written), re.ASCII)
