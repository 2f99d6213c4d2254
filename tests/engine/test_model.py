from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rollouts.engine.loading import load_folder  # noqa: E402 - only where torch is
from rollouts.engine.model import SlotModel  # noqa: E402


def advance(model: SlotModel, rows: dict[int, tuple[int, list[int]]]) -> Any:
    """Run slot -> (start, tokens) one step; the logits of all positions."""
    slots = np.array(sorted(rows))
    lengths = np.array([len(rows[slot][1]) for slot in slots])
    tokens = np.zeros((len(slots), lengths.max()), np.int64)
    for row, slot in enumerate(slots):
        tokens[row, : lengths[row]] = rows[slot][1]
    starts = np.array([rows[slot][0] for slot in slots])
    return model.forward(slots, starts, tokens, lengths, every_position=True)


def whole(model: SlotModel, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model.model(torch.tensor([tokens])).logits[0]


@pytest.fixture
def model(tiny_folder: Path) -> SlotModel:
    return SlotModel(load_folder(tiny_folder), slots=5)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def test_chunks_of_ragged_rows_give_the_logits_of_the_whole_sequence(model: SlotModel) -> None:
    """Whatever the other rows and the chunk sizes, a row's logits equal those of a separate forward pass."""
    first, second = tokens(40, 0), tokens(23, 1)
    got = {1: [], 3: []}
    logits = advance(model, {1: (0, first[:30]), 3: (0, second[:5])})
    got[1].append(logits[0]), got[3].append(logits[1, :5])
    logits = advance(model, {3: (5, second[5:22])})
    got[3].append(logits[0])
    logits = advance(model, {0: (0, [9]), 1: (30, first[30:31]), 3: (22, second[22:])})
    got[1].append(logits[1]), got[3].append(logits[2])
    logits = advance(model, {1: (31, first[31:])})
    got[1].append(logits[0])
    assert torch.allclose(torch.cat(got[1]), whole(model, first), atol=1e-5)
    assert torch.allclose(torch.cat(got[3]), whole(model, second), atol=1e-5)


def test_a_copied_prefix_is_as_good_as_a_computed_one(model: SlotModel) -> None:
    """Logits after a prefix copied from another slot equal those of the whole sequence."""
    prefix, rest = tokens(17, 2), tokens(6, 3)
    advance(model, {4: (0, prefix + tokens(3, 4))})
    model.copy(4, 0, 17)
    logits = advance(model, {0: (17, rest)})
    assert torch.allclose(logits[0], whole(model, prefix + rest)[17:], atol=1e-5)


def test_the_cache_grows_and_keeps_its_content(model: SlotModel) -> None:
    """Sequences longer than the first capacity are served, and shorter ones are not affected."""
    long, short = tokens(300, 5), tokens(12, 6)
    advance(model, {0: (0, short[:8])})
    assert model.capacity < len(long)
    logits = advance(model, {0: (8, short[8:]), 2: (0, long)})
    assert torch.allclose(logits[0, :4], whole(model, short)[8:], atol=1e-5)
    assert torch.allclose(logits[1], whole(model, long), atol=1e-5)


def test_only_the_last_position_of_each_row_is_returned_by_default(model: SlotModel) -> None:
    """The short form is the row's last real position, not a padded one."""
    rows = np.array([tokens(9, 7), tokens(9, 8)])
    lengths = np.array([9, 4])
    logits = model.forward(np.array([0, 2]), np.zeros(2, np.int64), rows, lengths)
    assert torch.allclose(logits[0], whole(model, rows[0].tolist())[-1], atol=1e-5)
    assert torch.allclose(logits[1], whole(model, rows[1, :4].tolist())[-1], atol=1e-5)


def test_bfloat16_agrees_with_float32_within_its_rounding(tiny_folder: Path) -> None:
    """Chunk by chunk through the slots; logits are float32 either way."""
    exact = SlotModel(load_folder(tiny_folder), slots=2)
    rounded = SlotModel(load_folder(tiny_folder, dtype="bfloat16"), slots=2)
    first, second = tokens(9, 1), tokens(5, 2)
    logits = []
    for model in (exact, rounded):
        advance(model, {0: (0, first)})
        logits.append(advance(model, {0: (9, second), 1: (0, first)}))
    assert rounded.model.dtype is torch.bfloat16
    assert logits[1].dtype is torch.float32
    difference = (logits[0].log_softmax(-1) - logits[1].log_softmax(-1)).abs()
    assert 0 < difference[:, :5].max() < 0.05
