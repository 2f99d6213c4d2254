"""The table decodes any ids as the tokenizer does, for real tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engine import DEMO_MODEL
from rollouts.renderer import load_tokenizer
from rollouts.renderer.byte_level import ByteTable

DEMO = load_tokenizer(DEMO_MODEL)


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))


@given(st.lists(st.integers(0, len(DEMO) - 1), max_size=40))
def test_the_table_decodes_as_the_tokenizer_does(ids: list[int]) -> None:
    """Also for characters split between tokens, and for special tokens."""
    table = ByteTable.of(DEMO)
    assert table is not None
    assert table.decode(ids) == decoded(DEMO, ids)
    many = ids * 300
    assert table.decode(np.array(many, np.int32)) == decoded(DEMO, many)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "deepseek_v3", "gptoss"])
def test_real_tokenizers_have_a_table(name: str, tokenizer: Callable[..., Any]) -> None:
    """Ids in several orders, so that the bytes of one character are joined and split."""
    real = tokenizer(name)
    table = ByteTable.of(real)
    assert table is not None
    size = len(real)  # reads the vocabulary with tokenizers 0.22
    for step in (1, 7, 101, 9973):
        ids = [(step * number) % size for number in range(5000)]
        assert table.decode(ids) == decoded(real, ids)
        assert table.decode(np.array(ids, np.int32)) == decoded(real, ids)


def test_tokens_that_are_longer_than_a_row_are_whole(tokenizer: Callable[..., Any]) -> None:
    """Alone, in sequence, and among short ones; a row has 16 bytes, the longest token at least 128."""
    real = tokenizer("qwen3")
    table = ByteTable.of(real)
    assert table is not None
    lengths = {number: len(text) for number, text in enumerate(table._table)}
    longer = [number for number in lengths if lengths[number] > 16]
    exact = [number for number in lengths if lengths[number] in (0, 1, 15, 16, 17)]
    assert max(lengths.values()) >= 128
    random = np.random.default_rng(5)
    for among in (longer, exact, [*longer, *exact], list(lengths)):
        for size in (255, 256, 500, 5000):
            ids = random.choice(among, size).astype(np.int32)
            assert table.decode(ids) == decoded(real, ids.tolist())


def test_an_unknown_id_is_not_decoded() -> None:
    """A model may sample ids that its tokenizer does not have; tokens may be added to a tokenizer later."""
    grown = load_tokenizer(DEMO_MODEL)
    old = ByteTable.of(grown)
    new = len(grown)
    assert old is not None
    assert old.decode([new]) is None
    assert old.decode(np.full(1000, new, np.int32)) is None
    grown.add_tokens(["<|new|>"], special_tokens=True)
    again = ByteTable.of(grown)
    assert again is not None
    assert again.decode([1, new]) == decoded(grown, [1, new])


def test_other_tokenizers_have_no_table() -> None:
    """The tokenizer decodes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    raw.decoder = decoders.WordPiece()
    assert ByteTable.of(PreTrainedTokenizerFast(tokenizer_object=raw)) is None
