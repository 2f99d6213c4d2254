"""Metrics of a batch by environment, where prompts name theirs.

Invariant: a rollout counts once, however many branches it has. This module is loaded where a sample names its
environment.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rollouts.dtypes.messages import ENVIRONMENT
from rollouts.training.branches import reward_of_rollout
from rollouts.training.sample import Sample

__all__ = ["environment_metrics"]


def environment_metrics(
    rollouts: Sequence[Sequence[Sample]], turns_of: Callable[[Sequence[Sample]], int]
) -> dict[str, float]:
    """Means over the rollouts of each environment, as ``environment/NAME/...``.

    Args:
        rollouts: the branches of each rollout.
        turns_of: returns the replies in the branches of a rollout.

    Returns:
        ``share`` of the rollouts, ``reward/mean``, ``reward/std``, ``turns/mean``, and ``response_length/mean`` in
        tokens.
    """
    numbers: dict[str, float] = {}
    names = {str(sample.metadata[ENVIRONMENT]) for one in rollouts for sample in one if ENVIRONMENT in sample.metadata}
    for name in sorted(names):
        selected = [one for one in rollouts if str(one[-1].metadata.get(ENVIRONMENT)) == name]
        rewards = [reward_of_rollout(one) or 0.0 for one in selected]
        means = {
            "share": len(selected) / len(rollouts),
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "turns/mean": statistics.fmean([turns_of(one) for one in selected]),
            "response_length/mean": statistics.fmean([sample.response_length for one in selected for sample in one]),
        }
        numbers.update({f"environment/{name}/{key}": value for key, value in means.items()})
    return numbers
