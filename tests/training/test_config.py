"""A config is valid once constructed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.training import (
    Prompt,
    RolloutConfig,
    Sample,
    check_min_reward,
    check_quality_and_diversity,
    check_reward_nonzero_std,
)


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    return []


def config(**fields: Any) -> RolloutConfig:
    return RolloutConfig(**{"batch_size": 4, "generate_fn": generate, **fields})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("batch_size", 0, "an integer >= 1"),
        ("batch_size", 2.0, "an integer >= 1"),
        ("batch_size", True, "an integer >= 1"),
        ("n_samples_per_prompt", 0, "an integer >= 1"),
        ("n_samples_per_prompt", "8", "an integer >= 1"),
        ("over_sampling_factor", 0.5, "a number >= 1"),
        ("over_sampling_factor", float("nan"), "a number >= 1"),
        ("over_sampling_factor", float("inf"), "a number >= 1"),
        ("generate_fn", None, "a function"),
        ("reward_fn", 1.0, "a function or None"),
        ("filter_fn", "check_min_reward", "a function or None"),
        ("max_attempts", 0, "an integer >= 1"),
        ("on_failure", "ignore", '"drop_group" or "stop"'),
        ("patience", 0, "an integer >= 1"),
        ("rollout_seconds", 0, "a number > 0"),
        ("reward_seconds", -1, "a number > 0"),
        ("filter_seconds", float("inf"), "a number > 0"),
        ("group_rm", "yes", ""),
    ],
)
def test_a_bad_field_is_refused_before_work_starts(field: str, value: Any, expected: str) -> None:
    """By field, value and expectation."""
    with pytest.raises(ConfigError if expected else TypeError) as caught:
        config(**{field: value})
    assert (f"RolloutConfig.{field}: got {value!r}; expected {expected}" if expected else field) in str(caught.value)


@pytest.mark.parametrize(
    "filter_fn",
    [
        check_reward_nonzero_std,
        check_quality_and_diversity,
        partial(check_quality_and_diversity, min_reward=0.1),
        partial(partial(check_reward_nonzero_std)),
    ],
)
def test_one_rollout_has_no_spread(filter_fn: Any) -> None:
    """n = 1 with a filter on spread would drop everything (slime and the original do), also through a partial."""
    with pytest.raises(ConfigError, match="n_samples_per_prompt: got 1; expected at least 2 with filter_fn=check_"):
        config(n_samples_per_prompt=1, filter_fn=filter_fn)
    config(n_samples_per_prompt=1, filter_fn=check_min_reward)
    config(n_samples_per_prompt=2, filter_fn=filter_fn)


def test_a_group_reward_needs_a_function() -> None:
    """``group_rm`` alone says nothing."""
    with pytest.raises(ConfigError, match="reward_fn: got None; expected a function of the group"):
        config(group_rm=True)


@pytest.mark.parametrize(("size", "factor", "groups"), [(32, 1.5, 48), (1, 1, 1), (3, 1.5, 5), (10, 1.1, 11)])
def test_groups_in_work(size: int, factor: float, groups: int) -> None:
    """Rounded up, and not by the error of a float."""
    assert config(batch_size=size, over_sampling_factor=factor).max_inflight_groups == groups


def test_groups_in_flight_are_bounded() -> None:
    """By the product; a batch beyond the bound has no factor that would do, and none is named."""
    assert config(batch_size=800_000, over_sampling_factor=1.25).max_inflight_groups == 1_000_000
    for size, factor in ((800_000, 1.26), (2_000_000, 1.0)):
        with pytest.raises(ConfigError, match=r"over_sampling_factor: got \d+\.0; expected at most 1000000 groups in"):
            config(batch_size=size, over_sampling_factor=factor)


def test_patience_has_a_default() -> None:
    """Eight batches, at least 64 groups."""
    assert [config(batch_size=size).rejections_allowed for size in (1, 8, 100)] == [64, 64, 800]
    assert config(patience=3).rejections_allowed == 3


def test_a_config_is_described_in_plain_values() -> None:
    """Functions by name, for the record of a run; and it cannot be changed."""
    described = config(filter_fn=partial(check_min_reward, min_reward=1)).describe()
    assert described["generate_fn"] == "generate"
    assert described["filter_fn"] == "check_min_reward"
    assert described["reward_fn"] is None
    with pytest.raises(AttributeError):
        config().batch_size = 3  # type: ignore[misc]
