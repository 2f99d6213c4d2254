"""Rewards: a finite float on every sample, or a typed failure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollouts.errors import RewardFailure
from rollouts.training import Sample
from rollouts.training.scoring import score, score_group


class Refuses:
    """Like a tensor of two elements: it has ``__float__``, and it raises RuntimeError."""

    def __float__(self) -> float:
        raise RuntimeError("only one element tensors can be converted")


NO_NUMBERS: list[Any] = [None, float("nan"), float("-inf"), "1.0", b"1", [1.0], {}, 10**400, 1j, Refuses(), object]


@pytest.mark.parametrize("value", [1, 0.25, True, np.float32(0.5), np.int64(3), np.array(2.0)], ids=repr)
async def test_a_number_of_any_kind_becomes_a_float(value: Any) -> None:
    """Sync or async, alone or in a group."""

    async def later(sample: Sample) -> Any:
        return value

    for function in (lambda sample: value, later):
        sample = Sample()
        await score(sample, function, seconds=20)
        assert type(sample.reward) is float
        assert sample.reward == float(value)
    group = [Sample(), Sample()]
    await score_group(group, lambda samples: (value, 0), seconds=20)
    assert [sample.reward for sample in group] == [float(value), 0.0]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
async def test_what_is_no_finite_number_is_a_failure(value: Any) -> None:
    """Never a zero; the sample keeps what it had."""
    sample = Sample(reward=0.5)

    def judge(sample: Sample) -> Any:
        return value

    with pytest.raises(RewardFailure, match=r"reward from judge: got .*; expected a finite number"):
        await score(sample, judge, seconds=20)
    assert sample.reward == 0.5
    with pytest.raises(RewardFailure, match="expected a finite number"):
        await score_group([sample], lambda samples: [value], seconds=20)


async def test_without_a_function_the_rollout_must_bring_its_reward() -> None:
    """A missing reward is found here, before a filter or a trainer meets it."""
    sample = Sample(reward=1)
    await score(sample, None, seconds=20)
    assert type(sample.reward) is float
    with pytest.raises(RewardFailure, match=r"the rollout itself \(no reward_fn is set\): got None"):
        await score(Sample(), None, seconds=20)


@pytest.mark.parametrize("values", [None, 1.0, "11", {}, iter([1.0, 1.0]), [1.0], [1.0] * 3])
async def test_a_group_reward_is_a_list_of_the_same_length(values: Any) -> None:
    """Otherwise nothing is set."""
    group = [Sample(), Sample()]
    with pytest.raises(RewardFailure, match="group reward"):
        await score_group(group, lambda samples: values, seconds=20)
    assert [sample.reward for sample in group] == [None, None]


async def test_a_group_is_scored_whole_or_not_at_all() -> None:
    """One bad number among good ones sets none of them."""
    group = [Sample(), Sample()]
    with pytest.raises(RewardFailure):
        await score_group(group, lambda samples: [1.0, None], seconds=20)
    assert [sample.reward for sample in group] == [None, None]
