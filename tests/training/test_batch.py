"""Samples as tensors: what stands where, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.training import Sample
from rollouts.training.batch import collate


def sample(**fields: Any) -> Sample:
    given = {
        "tokens": [5, 6, 7],
        "loss_mask": [0, 1, 0],
        "rollout_log_probs": [0.0, -0.5, 0.0],
        "reward": 1.0,
        "group_index": 4,
        "metadata": {"n": 1},
    }
    return Sample(**{**given, **fields})


def test_rows_are_padded_at_the_right() -> None:
    """Row i of each tensor is sample i; padding has the pad id, is not attended to, not trained, and has logprob 0."""
    long = sample(tokens=[1, 2, 3, 4, 5], loss_mask=[0, 0, 1, 1, 0], rollout_log_probs=[0, 0, -1, -2, 0], reward=0.0)
    batch = collate([sample(), long], pad_token_id=9)
    assert batch.tokens.tolist() == [[5, 6, 7, 9, 9], [1, 2, 3, 4, 5]]
    assert batch.loss_masks.tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.rollout_log_probs.tolist() == [[0, -0.5, 0, 0, 0], [0, 0, -1, -2, 0]]


def test_one_number_a_sample_stands_beside_them() -> None:
    """Rewards, lengths, response lengths (from the first sampled token on) and groups are as long as the batch."""
    batch = collate([sample(), sample(reward=0.25, group_index=7)])
    assert batch.rewards.tolist() == [1.0, 0.25]
    assert batch.lengths.tolist() == [3, 3]
    assert batch.response_lengths.tolist() == [2, 2]
    assert batch.group_indices.tolist() == [4, 7]
    assert batch.metadata == ({"n": 1}, {"n": 1})
    assert len(batch) == len(batch.samples) == 2


def test_the_dtypes_are_those_documented() -> None:
    """Ids and counts are int64, masks bool, logprobs and rewards float32."""
    batch = collate([sample()])
    kinds = {
        name: str(getattr(batch, name).dtype).removeprefix("torch.")
        for name in ("tokens", "loss_masks", "attention_mask", "rollout_log_probs", "rewards", "lengths")
    }
    assert list(kinds.values()) == ["int64", "bool", "bool", "float32", "float32", "int64"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": None}, r"samples\[1\]\.reward: got None; expected a number"),
        ({"group_index": None}, r"samples\[1\]\.group_index"),
        ({"rollout_log_probs": None}, r"samples\[1\]\.rollout_log_probs"),
        ({"tokens": [], "loss_mask": [], "rollout_log_probs": []}, r"samples\[1\]\.tokens"),
    ],
)
def test_a_sample_that_lacks_something_is_named(fields: dict[str, Any], message: str) -> None:
    """The message says which sample and which field."""
    with pytest.raises(ConfigError, match=message):
        collate([sample(), sample(**fields)])


def test_no_samples_are_no_batch() -> None:
    """An empty list is refused."""
    with pytest.raises(ConfigError, match="at least one sample"):
        collate([])
