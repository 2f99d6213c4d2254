"""Decoding for byte-level tokenizers by a table of bytes: what the raw tokenizer does, several times as fast.

Invariant: a table exists only where it gave what the tokenizer gives, for every id there is; elsewhere there is none,
and the tokenizer decodes itself. This module knows no text but that of tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollouts.dtypes import TokenColumn

__all__ = ["BYTES", "ByteTable"]


class ByteTable:
    """The bytes of each id. Made by :meth:`of`."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._lengths = np.array([len(text) for text in table], np.int32)
        self._rows = np.array(table, f"S{_ROW}").view(f"V{_ROW}")

    @classmethod
    def of(cls, tokenizer: Any) -> ByteTable | None:
        """The table of a transformers tokenizer, made once; ``None`` where it does not write tokens byte by byte."""
        size = len(tokenizer)  # grows when tokens are added
        known = _MADE.get(tokenizer)
        if known is None or known[0] != size:
            known = _MADE[tokenizer] = (size, cls._made_of(tokenizer.backend_tokenizer))
        return known[1]

    @classmethod
    def _made_of(cls, raw: Any) -> ByteTable | None:
        if type(raw.decoder).__name__ != "ByteLevel":
            return None
        vocabulary = raw.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            table[token] = _bytes_of(text)
        made = cls(table)
        every = list(range(len(table)))
        same = (
            said == made.decode(ids) == made.decode(np.array(ids, np.int32))
            for ids in (every, every[::-1])
            for said in [raw.decode(ids, skip_special_tokens=False)]
        )
        return made if all(same) else None

    def decode(self, ids: Sequence[int] | TokenColumn) -> str | None:
        """Text of ids, none of them negative; ``None`` if there is one that the tokenizer did not have."""
        try:
            if isinstance(ids, np.ndarray):
                if len(ids) >= _MANY:
                    return self._in_rows(ids)
                ids = ids.tolist()
            return b"".join(map(self._table.__getitem__, ids)).decode("utf-8", "replace")
        except IndexError:
            return None

    def _in_rows(self, ids: TokenColumn) -> str:
        """Write a whole row for each id, one behind the other: where a text ends before its row, the next is written.

        That a later row is the one that stays is numpy's order of assignment, which making the table has tried out.
        """
        lengths = self._lengths.take(ids)
        ends = lengths.cumsum(dtype=np.intp)
        starts, size = ends - lengths, int(ends[-1])
        written = bytearray(size + _ROW)
        np.ndarray(size + 1, self._rows.dtype, written, strides=(1,))[starts] = self._rows.take(ids)
        longer = (lengths > _ROW).nonzero()[0]
        for start, token in zip(starts[longer].tolist(), ids[longer].tolist(), strict=True):
            written[start : start + len(self._table[token])] = self._table[token]
        return str(memoryview(written)[:size], "utf-8", "replace")


_ROW = 16
"""Bytes; few tokens that a model says have more."""
_MANY = 128
"""Ids from which on their bytes are read from one piece of memory, which is nearer at hand than as many objects."""

_MADE: weakref.WeakKeyDictionary[Any, tuple[int, ByteTable | None]] = weakref.WeakKeyDictionary()


def _bytes_of(text: str) -> bytes:
    """A token as bytes: each character stands for one; where one does not, the token is text as it is."""
    try:
        return bytes(map(BYTES.__getitem__, text))
    except KeyError:
        return text.encode()


def _alphabet() -> dict[str, int]:
    """The characters that stand for bytes: printable ones for themselves, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTES = _alphabet()
"""The byte that each character of a byte-level vocabulary stands for."""
