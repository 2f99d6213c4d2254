"""Filters that choose the groups to train on.

Invariant: a filter is pure: it reads a group (same prompt, rewards set) and returns True to keep it; it never keeps an
empty group. Every ``check_*`` is a ``filter_fn``; thresholds can be bound with ``functools.partial``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rollouts.base.validators import finite
from rollouts.errors import ConfigError
from rollouts.training.branches import by_rollout
from rollouts.training.status import Status

if TYPE_CHECKING:
    from rollouts.training.comparisons import Comparison
    from rollouts.training.sample import Sample

__all__ = [
    "check_any_success",
    "check_min_reward",
    "check_quality_and_diversity",
    "check_reasonable_length",
    "check_response_diversity",
    "check_reward_nonzero_std",
    "make_length_filter",
    "make_threshold_filter",
]

STD_FLOOR = 1e-6
"""A standard deviation of rewards at or below this counts as zero; slime's threshold."""


def check_reward_nonzero_std(samples: Sequence[Sample], by: Comparison | None = None) -> bool:
    """Keep if two rewards that are compared differ: in a group without spread every advantage is zero.

    Uses the unbiased standard deviation, as slime does. A group of one sample has no spread. ``by`` says which rewards
    are compared (:func:`~rollouts.training.group_advantages`): in a game of several agents, those of one seat.
    """
    from rollouts.training.comparisons import by_comparison  # here: the import of a filter stays small

    compared = [_rewards(members) for members in by_comparison(samples, by)]
    return any(len(rewards) > 1 and statistics.stdev(rewards) > STD_FLOOR for rewards in compared)


def check_min_reward(samples: Sequence[Sample], min_reward: float = 0.5) -> bool:
    """Keep if at least one reward reaches ``min_reward``."""
    return max(_rewards(samples), default=float("-inf")) >= min_reward


def check_response_diversity(samples: Sequence[Sample], min_unique_ratio: float = 0.5) -> bool:
    """Keep if the share of distinct responses, stripped of white space, is at least ``min_unique_ratio``.

    The response of a rollout is that of all its branches together.
    """
    rollouts = by_rollout(samples)
    unique = {tuple(sample.response.strip() for sample in branches) for branches in rollouts}
    return bool(samples) and len(unique) / len(rollouts) >= min_unique_ratio


def check_reasonable_length(samples: Sequence[Sample], min_tokens: int = 1, max_tokens: int = 32_768) -> bool:
    """Keep if every response has between ``min_tokens`` and ``max_tokens`` tokens, both included."""
    return bool(samples) and all(min_tokens <= sample.response_length <= max_tokens for sample in samples)


def check_any_success(samples: Sequence[Sample]) -> bool:
    """Keep if at least one rollout has status COMPLETED."""
    return any(sample.status is Status.COMPLETED for sample in samples)


def check_quality_and_diversity(
    samples: Sequence[Sample], min_reward: float = 0.5, min_unique_ratio: float = 0.5
) -> bool:
    """Keep if the rewards differ, one reaches ``min_reward``, and enough responses are distinct."""
    return (
        check_reward_nonzero_std(samples)
        and check_min_reward(samples, min_reward)
        and check_response_diversity(samples, min_unique_ratio)
    )


def make_threshold_filter(
    min_reward: float = float("-inf"), max_reward: float = float("inf")
) -> Callable[[Sequence[Sample]], bool]:
    """Create a filter that keeps a group if its mean reward is between the two bounds, both included.

    A rollout counts once, however many branches it has. For example, ``make_threshold_filter(0.1, 0.9)`` drops prompts
    that are always or never solved.
    """
    if not min_reward <= max_reward:
        raise ConfigError.of("make_threshold_filter(min_reward, max_reward)", (min_reward, max_reward), "min <= max")

    def check_mean_reward(samples: Sequence[Sample]) -> bool:
        means = [statistics.fmean(_rewards(branches)) for branches in by_rollout(samples)]
        return bool(means) and min_reward <= statistics.fmean(means) <= max_reward

    return check_mean_reward


def make_length_filter(min_tokens: int = 1, max_tokens: int = 32_768) -> Callable[[Sequence[Sample]], bool]:
    """Create :func:`check_reasonable_length` with these bounds."""
    if not 0 <= min_tokens <= max_tokens:
        raise ConfigError.of("make_length_filter(min_tokens, max_tokens)", (min_tokens, max_tokens), "0 <= min <= max")

    def check_length(samples: Sequence[Sample]) -> bool:
        return check_reasonable_length(samples, min_tokens, max_tokens)

    return check_length


def _rewards(samples: Sequence[Sample]) -> list[float]:
    """Return the rewards of scored samples; raise if one is not a number, since filters run after rewards."""
    rewards = []
    for sample in samples:
        if (reward := finite(sample.reward)) is None:
            raise ConfigError.of(f"{sample!r}.reward", sample.reward, "a number: filters run on scored samples")
        rewards.append(reward)
    return rewards
