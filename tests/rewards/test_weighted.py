"""Sums of rewards: all parts or a failure, with the parts kept."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.errors import ConfigError, RewardFailure
from rollouts.rewards import WeightedGroupSum, WeightedSum, brevity, each, score, score_group
from rollouts.training import Sample


def right(sample: Sample) -> float:
    return float(sample.response == sample.label)


async def short(sample: Sample) -> float:
    return 1 / len(sample.response)


def broken(sample: Sample) -> float:
    raise KeyError("ground_truth")


async def test_a_weighted_sum_keeps_its_parts() -> None:
    """Sync and async parts; weights may be negative."""
    sample = Sample(response="ab", label="ab", metadata={"source": "x"})
    await score(sample, WeightedSum({"right": (1.0, right), "short": (-0.5, short)}), seconds=20)
    assert sample.reward == 0.75
    assert sample.metadata == {"source": "x", "rewards": {"right": 1.0, "short": 0.5}}


async def test_a_part_that_fails_fails_the_sum() -> None:
    """By its name; so is a part that is not a number."""
    for function, words in ((broken, "part bad: reward broken raised KeyError"), (lambda s: None, "part bad: .*None")):
        sample = Sample(response="ab", label="ab")
        with pytest.raises(RewardFailure, match=words):
            await score(sample, WeightedSum({"right": (1.0, right), "bad": (0.1, function)}), seconds=20)
        assert (sample.reward, sample.metadata) == (None, {})


async def test_a_group_sum_joins_group_rewards_and_others() -> None:
    """Each sample has its own sum, and its own parts."""
    group = [Sample(response="ab", label="ab", tokens=[1] * n, loss_mask=[1] * n) for n in (2, 4, 3)]
    await score_group(group, WeightedGroupSum({"right": (1.0, each(right)), "brief": (0.5, brevity)}), seconds=20)
    assert [sample.reward for sample in group] == [1.5, 1.0, 1.25]
    assert group[2].metadata["rewards"] == {"right": 1.0, "brief": 0.5}


async def test_a_group_sum_fails_as_a_whole() -> None:
    """One sample that cannot be scored costs the group its rewards."""
    group = [Sample(response="ab", label="ab"), Sample(response="", label="ab")]
    with pytest.raises(RewardFailure, match=r"part short: .*ZeroDivisionError"):
        await score_group(group, WeightedGroupSum({"short": (1.0, each(short))}), seconds=20)
    assert [sample.reward for sample in group] == [None, None]


def test_brevity_of_equal_lengths_is_one() -> None:
    """No division by zero."""
    assert brevity([Sample(), Sample()]) == [1.0, 1.0]


NAN = float("nan")


@pytest.mark.parametrize(
    "parts", [{}, None, {"a": right}, {"a": (right, 1.0)}, {"a": (True, right)}, {"a": (NAN, right)}]
)
def test_invalid_parts_are_refused(parts: Any) -> None:
    """By name, before work starts."""
    for kind in (WeightedSum, WeightedGroupSum):
        with pytest.raises(ConfigError, match=r"\.parts"):
            kind(parts)
