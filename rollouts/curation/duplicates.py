"""Duplicates and overlap: exact duplicates, near duplicates, and text that is in a held-out set.

Invariant: a check costs the same for the first and the last row. Memory: 8 to 24 bytes for a row that was kept; for a
near-duplicate index 5 KB a row; for held-out texts some 120 bytes a word.

This module knows texts and numbers, not rollouts.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rollouts.base.extras import install_command
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError

__all__ = ["HashSet", "HeldOut", "NearDuplicates", "digest_of"]

_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
"""Kana and Han, which are written without spaces: each sign counts as a word."""
_WORD = re.compile(rf"[{_SIGNS}]|[^\W{_SIGNS}]+")
_PIECE = re.compile(rf"{_WORD.pattern}|[^\w\s]")
_GRAM = 13
"""Words of a sequence that shows overlap (Brown et al. 2020, appendix C)."""
_COMMON_SHARE, _COMMON_LEAST = 0.05, 3
"""A sequence in more than this share of the distinct held-out texts, and in more than this many, is common wording."""

_AT_ONCE = 4096


def digest_of(*parts: bytes) -> int:
    """A 64-bit digest of byte strings, never 0."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "little") or 1


class HashSet:
    """A set of 64-bit digests in one array: 12 to 24 bytes each, where a Python set takes some 100."""

    def __init__(self) -> None:
        self._slots = np.zeros(1024, np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, digest: int) -> bool:
        return bool(self._slots[self._place(digest)])

    def add(self, digest: int) -> bool:
        """Add a digest; returns whether it was new."""
        if 3 * self._count >= 2 * len(self._slots):
            self._grow()
        place = self._place(digest)
        if self._slots[place]:
            return False
        self._slots[place] = digest
        self._count += 1
        return True

    def _place(self, digest: int) -> int:
        """The slot of a digest: where it is, or the free one where it belongs."""
        slots, last = self._slots, len(self._slots) - 1
        place = digest & last
        while (found := int(slots[place])) != 0 and found != digest:
            place = (place + 1) & last
        return place

    def _grow(self) -> None:
        old = self._slots[self._slots != 0]
        self._slots = np.zeros(2 * len(self._slots), np.uint64)
        for start in range(0, len(old), _AT_ONCE):  # a list of all takes more than the slots
            for digest in old[start : start + _AT_ONCE].tolist():
                self._slots[self._place(digest)] = digest


class HeldOut:
    """Texts that must not be in a training set: their sequences of 13 words, and each whole text.

    A sequence that many of the texts share, such as an instruction, is their common wording and shows no overlap.

    Args:
        texts: the texts, without system messages.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        grams: Counter[int] = Counter()
        self._whole: set[int] = set()
        self.texts = 0
        for text in texts:
            self.texts += 1
            whole = _whole(text)
            if whole not in self._whole:  # equal texts count once
                self._whole.add(whole)
                grams.update(set(_grams(text)))
        most = max(_COMMON_LEAST, int(_COMMON_SHARE * len(self._whole)))
        self._grams = {gram for gram, count in grams.items() if count <= most}
        self.common = len(grams) - len(self._grams)
        """Sequences that are common wording."""

    def has(self, prompt: str, texts: Iterable[str]) -> bool:
        """Whether the prompt is one of the texts, or one of ``texts`` shares a sequence of 13 words with them."""
        if _whole(prompt) in self._whole:
            return True
        return any(gram in self._grams for text in texts for gram in _grams(text))


def _whole(text: str) -> int:
    return digest_of(" ".join(_plain(text).split()).encode("utf-8", "replace"))


def _plain(text: str) -> str:
    """Text whatever its case, the width of its letters and the composition of its accents."""
    return unicodedata.normalize("NFKC", text).casefold()


def _grams(text: str) -> Iterator[int]:
    words = _WORD.findall(_plain(text))
    for start in range(len(words) - _GRAM + 1):
        yield hash(tuple(words[start : start + _GRAM]))


class NearDuplicates:
    """An index of texts that finds the ones with a Jaccard similarity of at least ``threshold`` to an earlier one.

    The similarity is that of the sets of word pairs, estimated by MinHash (rensa 0.5.0: ``RMinHash``, ``RMinHashLSH``).

    Raises:
        ConfigError: the threshold is not between 0 and 1, or rensa is not installed.
    """

    _PERMUTATIONS = 256

    def __init__(self, threshold: float) -> None:
        if not 0 < threshold < 1:
            raise ConfigError.of("--near", threshold, "a similarity between 0 and 1, e.g. 0.8")
        if importlib.util.find_spec("rensa") is None:
            raise ConfigError.of("--near", threshold, f"rensa, which is not installed: {install_command('curate')}")
        self._rensa: Any = importlib.import_module("rensa")
        self._threshold = threshold
        bands = _bands(threshold, self._PERMUTATIONS)
        self._index = self._rensa.RMinHashLSH(threshold, self._PERMUTATIONS, bands)
        self._hashes: list[Any] = []

    def add(self, text: str) -> bool:
        """Add a row's text; returns whether it was unlike all that were added. A similar one is not added."""
        pieces = _PIECE.findall(_plain(text))
        pairs = [f"{one} {two}" for one, two in itertools.pairwise(pieces)] or pieces
        hashed = self._rensa.RMinHash(self._PERMUTATIONS, 42)
        hashed.update(pairs)
        if any(self._hashes[key].jaccard(hashed) >= self._threshold for key in self._index.query(hashed)):
            return False
        self._index.insert(len(self._hashes), hashed)
        self._hashes.append(hashed)
        return True


def _bands(threshold: float, permutations: int) -> int:
    """The fewest bands with which a pair at the threshold shares one with a probability of 0.99."""
    counts: Sequence[int] = [count for count in range(1, permutations + 1) if permutations % count == 0]
    return next(
        (count for count in counts if 1 - (1 - threshold ** (permutations // count)) ** count >= 0.99), permutations
    )
