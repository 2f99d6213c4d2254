"""Filters of scored groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.training import (
    Sample,
    Status,
    check_any_success,
    check_min_reward,
    check_quality_and_diversity,
    check_reasonable_length,
    check_response_diversity,
    check_reward_nonzero_std,
    make_length_filter,
    make_threshold_filter,
)


def group(*rewards: float | None, responses: str = "", lengths: tuple[int, ...] = ()) -> list[Sample]:
    samples = [Sample(reward=reward, status=Status.COMPLETED) for reward in rewards]
    for number, sample in enumerate(samples):
        sample.response = responses[number] if responses else str(number)
        length = lengths[number] if lengths else 1
        sample.tokens, sample.loss_mask = [0] * (length + 1), [0] + [1] * length
    return samples


@pytest.mark.parametrize(
    ("check", "samples", "answer"),
    [
        (check_reward_nonzero_std, group(0, 1), True),
        (check_reward_nonzero_std, group(1, 1, 1), False),
        (check_reward_nonzero_std, group(0.1, 0.1 + 1e-9), False),
        (check_reward_nonzero_std, group(1), False),
        (check_reward_nonzero_std, group(), False),
        (check_min_reward, group(0, 0.5), True),
        (check_min_reward, group(0, 0.49), False),
        (check_min_reward, group(), False),
        (partial(check_min_reward, min_reward=0), group(0), True),
        (check_response_diversity, group(0, 0, responses="aa"), True),
        (check_response_diversity, group(0, 0, 0, responses="aaa"), False),
        (check_response_diversity, group(), False),
        (check_reasonable_length, group(0, 0), True),
        (check_reasonable_length, group(0, 0, lengths=(1, 0)), False),
        (partial(check_reasonable_length, max_tokens=3), group(0, 0, lengths=(3, 4)), False),
        (check_any_success, group(0), True),
        (check_any_success, [Sample(status="truncated")], False),
        (check_any_success, [], False),
        (check_reasonable_length, [], False),
        (check_quality_and_diversity, [], False),
        (make_threshold_filter(), [], False),
        (make_length_filter(), [], False),
        (check_quality_and_diversity, group(0, 1), True),
        (check_quality_and_diversity, group(1, 1), False),
        (check_quality_and_diversity, group(0, 0.4), False),
        (check_quality_and_diversity, group(0, 0, 1, responses="aaa"), False),
        (make_threshold_filter(0.1, 0.9), group(0, 1), True),
        (make_threshold_filter(0.1, 0.9), group(1, 1), False),
        (make_threshold_filter(0.5, 0.5), group(0, 1), True),
        (make_length_filter(2, 3), group(0, 0, lengths=(2, 3)), True),
        (make_length_filter(2, 3), group(0, lengths=(4,)), False),
    ],
)
def test_each_filter_answers(check: Callable[[list[Sample]], bool], samples: list[Sample], answer: bool) -> None:
    """It returns a plain bool, and does not change the group."""
    before = [sample.to_dict() for sample in samples]
    assert check(samples) is answer
    assert [sample.to_dict() for sample in samples] == before


@pytest.mark.parametrize("check", [check_reward_nonzero_std, check_min_reward, make_threshold_filter()])
def test_an_unscored_sample_is_an_error(check: Callable[[list[Sample]], bool]) -> None:
    """A filter that runs before the reward raises (the original's read zeros)."""
    with pytest.raises(ConfigError, match=r"reward: got None; expected a number: filters run on scored samples"):
        check(group(1, None))


@pytest.mark.parametrize("check", [check_reward_nonzero_std, check_min_reward, make_threshold_filter()])
@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_a_number_is_an_error(check: Callable[[list[Sample]], bool], reward: float) -> None:
    """Also in one of the branches of a rollout: it counts neither as 0 nor as below every bound."""
    branches = group(1, reward)
    for sample in branches:
        sample.rollout_id = 0
    with pytest.raises(ConfigError, match=r"reward: got (nan|inf); expected a number"):
        check(branches)


@pytest.mark.parametrize(
    ("make", "bounds"),
    [
        (make_threshold_filter, (0.9, 0.1)),
        (make_threshold_filter, (float("nan"), 1.0)),
        (make_length_filter, (3, 2)),
        (make_length_filter, (-1, 2)),
    ],
)
def test_bounds_that_accept_nothing_are_refused(make: Callable[..., Any], bounds: tuple[Any, Any]) -> None:
    """Where the filter is made."""
    with pytest.raises(ConfigError, match=r"got \(.*\); expected"):
        make(*bounds)
