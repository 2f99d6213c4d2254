"""Group advantages: by the number of the group, each rollout once, and slime's own numbers where groups are equal."""

from __future__ import annotations

import random
from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from rollouts.errors import ConfigError
from rollouts.integrations.slime import normalise_rewards
from rollouts.integrations.slime.convert import to_slime
from rollouts.integrations.slime.records import records
from rollouts.training import Prompt
from tests.integrations.slime.launches import made_sample

GRPO = Namespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True, reward_key=None)


def some(group: int | None, rollout: int | None, reward: Any, *, removed: bool = False) -> Any:
    sample = records().sample(group_index=group, rollout_id=rollout, reward=reward)
    sample.remove_sample = removed
    return sample


def batch(rewards: list[list[float]]) -> list[Any]:
    return [
        some(group, 100 * group + member, reward)
        for group, members in enumerate(rewards)
        for member, reward in enumerate(members)
    ]


def test_equal_groups_in_order_give_slimes_numbers() -> None:
    """Mean taken off, divided by the unbiased spread and a millionth."""
    rng = random.Random(1)
    rewards = [[rng.choice([0.0, 0.25, 1.0]) for _ in range(8)] for _ in range(6)]
    rows = np.array(rewards, np.float32)
    expected = (rows - rows.mean(1, keepdims=True)) / (rows.std(1, ddof=1, keepdims=True) + 1e-6)
    raw, found = normalise_rewards(GRPO, batch(rewards))
    assert raw == [reward for members in rewards for reward in members]
    assert found == pytest.approx(expected.ravel().tolist(), abs=1e-5)


def test_unequal_and_scattered_groups_keep_their_own_statistics() -> None:
    """The example of the contract with one sample missing, shuffled: ±0.866 and the right signs everywhere else."""
    samples = batch([[0, 1, 0, 1], [1, 2, 1, 2], [2, 3, 2, 3]])[1:]
    random.Random(2).shuffle(samples)
    _, found = normalise_rewards(GRPO, samples)
    for sample, value in zip(samples, found, strict=True):
        if sample.group_index:
            expected = 0.8660 if sample.reward > sample.group_index + 0.5 else -0.8660
            assert value == pytest.approx(expected, abs=1e-4)
    assert sum(v for s, v in zip(samples, found, strict=True) if not s.group_index) == pytest.approx(0.0, abs=1e-5)


def test_a_rollout_counts_once_however_it_forks() -> None:
    """Siblings get the value that their rollout would have alone."""
    alone = [some(0, 1, 1.0), some(0, 2, 0.0), some(0, 3, 0.0)]
    forked = [some(0, 1, 1.0), some(0, 1, 1.0), some(0, 1, 1.0), some(0, 2, 0.0), some(0, 3, 0.0)]
    _, expected = normalise_rewards(GRPO, alone)
    _, found = normalise_rewards(GRPO, forked)
    assert found == [expected[0]] * 3 + expected[1:]


def test_removed_samples_do_not_count() -> None:
    """A rollout that failed and is out of the loss does not move the mean of its group."""
    _, expected = normalise_rewards(GRPO, [some(0, 1, 1.0), some(0, 2, 0.0)])
    _, found = normalise_rewards(GRPO, [some(0, 1, 1.0), some(0, 9, 0.0, removed=True), some(0, 2, 0.0)])
    assert [found[0], found[2]] == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"grpo_std_normalization": False}, [0.5, -0.5]),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, [0.5, -0.5]),
        ({"advantage_estimator": "ppo"}, [1.0, 0.0]),
        ({"rewards_normalization": False}, [1.0, 0.0]),
    ],
)
def test_slimes_flags_hold(flags: dict[str, Any], expected: list[float]) -> None:
    """Which estimators are centred, and which are scaled."""
    args = Namespace(**{**vars(GRPO), **flags})
    assert normalise_rewards(args, [some(0, 1, 1.0), some(0, 2, 0.0)])[1] == expected


def test_a_group_of_one_has_no_advantage() -> None:
    """It is 0, not NaN."""
    assert normalise_rewards(GRPO, [some(0, 1, 1.0)]) == ([1.0], [0.0])


def test_the_part_that_is_named_is_the_reward() -> None:
    """``--reward-key`` picks it."""
    args = Namespace(**{**vars(GRPO), "reward_key": "score"})
    raw, _ = normalise_rewards(args, [some(0, 1, {"score": 3.0, "other": 9.0}), some(0, 2, {"score": 1.0})])
    assert raw == [3.0, 1.0]


def test_half_numbered_batches_are_refused() -> None:
    """Without a number a sample belongs to no group."""
    with pytest.raises(ConfigError, match="group_index"):
        normalise_rewards(GRPO, [some(None, 1, 1.0), some(0, 2, 0.0)])


@pytest.mark.parametrize("name", ["seat", "conversation"])
@pytest.mark.parametrize("value", [["a list"], {"a": "dict"}, 7])
def test_a_row_may_have_other_values_of_these_names(name: str, value: Any) -> None:
    """Messages under "conversation", a row of seats: they name no agent, and the advantages are those without them."""
    samples = batch([[0.0, 1.0], [1.0, 1.0]])
    _, expected = normalise_rewards(GRPO, samples)
    for sample in samples:
        sample.metadata = {name: value}
    assert normalise_rewards(GRPO, samples)[1] == expected


def test_a_row_does_not_say_what_the_rewards_of_a_play_are_compared_with() -> None:
    """A value of that name in the data would mix the seats, silently."""
    rewards = {("white", 0): 1.0, ("white", 1): 0.0, ("black", 0): 5.0, ("black", 1): 4.0}
    records_of_play = []
    for (seat, rollout), reward in rewards.items():
        row = records().sample(group_index=0, rollout_id=rollout, metadata={"seat_comparison": "group"})
        sample = made_sample(Prompt("deal"), seat=seat, reward=reward, group_index=0, rollout_id=rollout)
        records_of_play.append(to_slime(sample, template=row))
    _, found = normalise_rewards(GRPO, records_of_play)
    assert found == pytest.approx([0.7071, -0.7071, 0.7071, -0.7071], abs=1e-3)
