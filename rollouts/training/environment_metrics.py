"""Metrics of a batch by environment, where prompts name theirs.

Invariant: a rollout counts once, however many branches it has. This module is loaded where a sample names its
environment.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from rollouts.dtypes.messages import ENVIRONMENT, REPLIES
from rollouts.training.branches import reward_of_rollout
from rollouts.training.sample import Sample

__all__ = ["environment_metrics"]


def environment_metrics(rollouts: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Means over the rollouts of each environment, as ``environment/NAME/...``.

    Args:
        rollouts: the branches of each rollout; the last one names the environment.

    Returns:
        ``share`` of the rollouts, ``reward/mean``, ``reward/std``, ``turns/mean``, and ``response_length/mean`` in
        tokens.
    """
    numbers: dict[str, float] = {}
    by_name = defaultdict[str, list[Sequence[Sample]]](list)
    for one in rollouts:
        if ENVIRONMENT in one[-1].metadata:
            by_name[str(one[-1].metadata[ENVIRONMENT])].append(one)
    for name, selected in sorted(by_name.items()):
        rewards = [reward_of_rollout(one) or 0.0 for one in selected]
        means = {
            "share": len(selected) / len(rollouts),
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "turns/mean": statistics.fmean([_turns(one) for one in selected]),
            "response_length/mean": statistics.fmean([sample.response_length for one in selected for sample in one]),
        }
        numbers.update({f"environment/{name}/{key}": value for key, value in means.items()})
    return numbers


def _turns(branches: Sequence[Sample]) -> int:
    return sum([sample.turns or int(sample.metrics.get(REPLIES, 0)) for sample in branches])
