"""Filters for slime's flags: our filters as dynamic sampling filters, and buffer filters that order waiting groups.

Invariant of the buffer filters: they remove and return at most ``num_samples`` groups of the buffer; the rest keeps its
order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.scoring import as_slime_filter, plain_reward
from rollouts.training import filters as ours

__all__ = [
    "check_any_success",
    "check_min_reward",
    "check_quality_and_diversity",
    "check_reasonable_length",
    "check_response_diversity",
    "check_reward_nonzero_std",
    "pop_first",
    "pop_hardest",
    "pop_most_advanced",
    "pop_stalest",
]

check_any_success = as_slime_filter(ours.check_any_success)
check_min_reward = as_slime_filter(ours.check_min_reward)
check_quality_and_diversity = as_slime_filter(ours.check_quality_and_diversity)
check_reasonable_length = as_slime_filter(ours.check_reasonable_length)
check_response_diversity = as_slime_filter(ours.check_response_diversity)
check_reward_nonzero_std = as_slime_filter(ours.check_reward_nonzero_std)


def _lowest_first(key: Callable[[Any, list[Any]], float]) -> Callable[..., list[list[Any]]]:
    """A buffer filter that takes the groups with the lowest key, of those with the same the first."""

    def pop(args: Any, rollout_id: int | None, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
        chosen = sorted(range(len(buffer)), key=lambda position: (key(args, buffer[position]), position))[:num_samples]
        groups = [buffer[position] for position in chosen]
        for position in sorted(chosen, reverse=True):
            del buffer[position]
        return groups

    return pop


def _begun(args: Any, group: list[Any]) -> float:
    begun = [(sample.metadata or {}).get("start_rollout_id") for sample in leaves(group)]
    return min((number for number in begun if number is not None), default=float("inf"))


def _ease(args: Any, group: list[Any]) -> float:
    rewards = [plain_reward(sample, args) for sample in leaves(group) if sample.reward is not None]
    if rewards:
        return statistics.fmean(rewards)
    return 1.0 - float((next(leaves(group)).metadata or {}).get("difficulty", 0.0))


pop_first = _lowest_first(lambda args, group: 0)
"""Take the groups that have waited longest."""
pop_stalest = _lowest_first(_begun)
"""Take the groups that started in the earliest call, so that they are used before they are too old."""
pop_most_advanced = _lowest_first(lambda args, group: -sum(sample.response_length for sample in leaves(group)))
"""Take the groups with the most response tokens: they cost the least to finish."""
pop_hardest = _lowest_first(_ease)
"""Take the groups with the lowest mean reward; unscored groups count 1 minus ``metadata["difficulty"]``."""
