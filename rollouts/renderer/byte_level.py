"""Fast decoding for byte-level tokenizers with a table of bytes; several times as fast as the raw tokenizer.

Invariant: a table exists only if it decodes every id exactly as the tokenizer does; otherwise the tokenizer decodes.
This module does not know messages or templates.

Long columns are decoded in overlapping numpy rows (25 lines). They stay, because each sample is decoded at least once:
of 4,096 tokens of Qwen3 rows take 16 ns of CPU each, joined bytes objects 69, the raw tokenizer 227; of 32,768 tokens
14, 65 and 218. Without them (``_MANY`` above every length) a reply of 8,192 tokens costs 6.9 ms of CPU in place of 5.6:
1.43 and 1.06 times the reference loop of ``scripts/bench targets --only L``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from rollouts.dtypes import TokenColumn
from rollouts.dtypes.lazy_numpy import np

__all__ = ["BYTES", "ByteTable"]


class ByteTable:
    """The bytes of each token id. Created by :meth:`of`."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._lengths = np.array([len(text) for text in table], np.int32)
        self._rows = np.array(table, f"S{_ROW}").view(f"V{_ROW}")

    @classmethod
    def of(cls, tokenizer: Any) -> ByteTable | None:
        """Return the table of a transformers tokenizer, cached; ``None`` if it is not a byte-level tokenizer."""
        size = len(tokenizer)  # grows when tokens are added
        cached = _TABLES.get(tokenizer)
        if cached is None or cached[0] != size:
            cached = _TABLES[tokenizer] = (size, cls._build(tokenizer.backend_tokenizer))
        return cached[1]

    @classmethod
    def _build(cls, raw: Any) -> ByteTable | None:
        if type(raw.decoder).__name__ != "ByteLevel":
            return None
        vocabulary = raw.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            table[token] = _bytes_of(text)
        built = cls(table)
        all_ids = list(range(len(table)))
        same = (
            expected == built.decode(ids) == built.decode(np.array(ids, np.int32))
            for ids in (all_ids, all_ids[::-1])
            for expected in [raw.decode(ids, skip_special_tokens=False)]
        )
        return built if all(same) else None

    def decode(self, ids: Sequence[int] | TokenColumn) -> str | None:
        """Return the text of non-negative ids; ``None`` if the table does not contain one of them."""
        try:
            if isinstance(ids, np.ndarray):
                if len(ids) >= _MANY:
                    return self._in_rows(ids)
                ids = ids.tolist()
            return b"".join(map(self._table.__getitem__, ids)).decode("utf-8", "replace")
        except IndexError:
            return None

    def _in_rows(self, ids: TokenColumn) -> str:
        """Write one fixed-width row per id; each row overwrites the unused end of the row before it.

        Correct only if numpy assigns rows in order; building the table checks that.
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
"""Bytes; few sampled tokens are longer."""
_MANY = 256
"""From this number of ids on, copying rows from one numpy array is faster than joining bytes objects (measured with
numpy 2.4: 128 ids 8.9 us in rows and 6.7 joined, 192 ids 8.9 and 9.6, 256 ids 9.8 and 11.9, 384 ids 10.8 and 16.5)."""

_TABLES: weakref.WeakKeyDictionary[Any, tuple[int, ByteTable | None]] = weakref.WeakKeyDictionary()


def _bytes_of(text: str) -> bytes:
    """Return the bytes of a token: one per character, or UTF-8 if a character is not in the alphabet."""
    try:
        return bytes(map(BYTES.__getitem__, text))
    except KeyError:
        return text.encode()


def _alphabet() -> dict[str, int]:
    """Map characters to bytes: printable bytes are their own characters, the others follow from U+0100, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + offset): byte for offset, byte in enumerate(others)}


BYTES = _alphabet()
"""The byte of each character of a byte-level vocabulary."""
