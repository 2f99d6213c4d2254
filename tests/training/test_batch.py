"""Samples as tensors: layout, and refused input."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.training import Sample
from rollouts.training.batch import collate, collate_packed, group_advantages, loss_weights


def sample(**fields: Any) -> Sample:
    defaults = {
        "tokens": [5, 6, 7],
        "loss_mask": [0, 1, 0],
        "rollout_log_probs": [0.0, -0.5, 0.0],
        "reward": 1.0,
        "group_index": 4,
        "metadata": {"n": 1},
    }
    return Sample(**{**defaults, **fields})


def test_rows_are_padded_at_the_right() -> None:
    """Row i of each tensor is sample i; padding has the pad id, is not attended to, not trained, and has logprob 0."""
    long = sample(tokens=[1, 2, 3, 4, 5], loss_mask=[0, 0, 1, 1, 0], rollout_log_probs=[0, 0, -1, -2, 0], reward=0.0)
    batch = collate([sample(), long], pad_token_id=9)
    assert batch.tokens.tolist() == [[5, 6, 7, 9, 9], [1, 2, 3, 4, 5]]
    assert batch.loss_masks.tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.rollout_log_probs.tolist() == [[0, -0.5, 0, 0, 0], [0, 0, -1, -2, 0]]


def test_each_sample_has_its_numbers() -> None:
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


# -- packed ------------------------------------------------------------------------------------------------------------


def test_packed_samples_are_concatenated() -> None:
    """There is no padding; positions restart in each sample, and the boundaries are its offsets."""
    long = sample(tokens=[1, 2, 3, 4], loss_mask=[0, 0, 1, 1], rollout_log_probs=[0, 0, -1, -2])
    packed = collate_packed([sample(), long])
    assert packed.tokens.tolist() == [5, 6, 7, 1, 2, 3, 4]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed.boundaries.tolist() == [0, 3, 7]
    assert packed.loss_masks.tolist() == [0, 1, 0, 0, 0, 1, 1]
    assert packed.rollout_log_probs.tolist() == [0, -0.5, 0, 0, 0, -1, -2]
    assert str(packed.boundaries.dtype) == "torch.int32"
    assert len(packed) == 2


# -- advantages and weights --------------------------------------------------------------------------------------------


def group(rewards: list[float], index: int = 0, **fields: Any) -> list[Sample]:
    return [
        sample(reward=reward, group_index=index, rollout_id=100 * index + n, **fields)
        for n, reward in enumerate(rewards)
    ]


def test_advantages_are_normalised_in_each_group() -> None:
    """Minus the mean, over the unbiased standard deviation + 1e-6, as slime has it; other groups do not matter."""
    torch = pytest.importorskip("torch")
    samples = [*group([1, 0, 0, 0]), *group([0.5, 2, 1, 0.25], 1)]
    rewards = torch.tensor([[1.0, 0, 0, 0], [0.5, 2, 1, 0.25]])
    rewards = rewards - rewards.mean(-1, keepdim=True)
    rewards = rewards / (rewards.std(-1, keepdim=True) + 1e-6)
    assert group_advantages(samples) == pytest.approx(rewards.flatten().numpy(), rel=1e-6)
    mixed = [samples[n] for n in (5, 0, 7, 1, 4, 2, 6, 3)]
    assert group_advantages(mixed) == pytest.approx(rewards.flatten().numpy()[[5, 0, 7, 1, 4, 2, 6, 3]], rel=1e-6)


def test_a_group_without_spread_has_no_advantage() -> None:
    """Equal rewards have advantage 0, and so has a single rollout."""
    assert group_advantages(group([0.7, 0.7, 0.7])).tolist() == [0, 0, 0]
    assert group_advantages(group([3.0])).tolist() == [0]


def test_branches_of_one_rollout_are_one_reward_of_the_group() -> None:
    """A rollout that forks counts once in the mean of its group."""
    whole = group([1, 0, 0])
    forked = [whole[0], sample(reward=1, group_index=0, rollout_id=0), *whole[1:]]
    assert group_advantages(forked).tolist() == [group_advantages(whole)[n] for n in (0, 0, 1, 2)]


def test_branches_of_one_rollout_share_one_weight() -> None:
    """Each rollout weighs 1 / rollouts in the whole loss, spread over its trained tokens, wherever they stand."""
    long = {"tokens": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1], "rollout_log_probs": [0, -1, -1, -1]}
    samples = [*group([1, 0]), sample(rollout_id=0, **long)]
    weights = loss_weights(samples)
    trained = [1, 1, 3]
    of_rollouts = [weights[0] * trained[0] + weights[2] * trained[2], weights[1] * trained[1]]
    assert of_rollouts == pytest.approx([0.5, 0.5])
    assert weights[0] == weights[2] == pytest.approx(1 / 4 / 2)


def test_a_sample_is_weighted_by_its_loss_multiplier() -> None:
    """With 0 it is left out of the loss, and the other weights stay."""
    plain = loss_weights([sample(rollout_id=0), sample(rollout_id=1)])
    assert loss_weights([sample(rollout_id=0, loss_multiplier=0.0), sample(rollout_id=1)]).tolist() == [
        0, plain[1]
    ]  # fmt: skip


def test_samples_without_a_rollout_id_are_rollouts_of_their_own() -> None:
    """So that a batch that knows no forks needs no ids."""
    assert loss_weights([sample(), sample()]) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(("fields", "message"), [({"reward": None}, "reward"), ({"group_index": None}, "group_index")])
def test_advantages_need_rewards_and_groups(fields: dict[str, Any], message: str) -> None:
    """The field that lacks them is named."""
    with pytest.raises(ConfigError, match=message):
        group_advantages([sample(), sample(**fields)])
