"""Metrics of a batch by seat, where a rollout has several agents.

Invariant: a conversation counts once, however many branches it has; only rewards of one seat are compared. This module
is loaded where a sample has a seat.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from rollouts.training.branches import reward_of_rollout
from rollouts.training.comparisons import by_comparison, by_conversation
from rollouts.training.sample import Sample

__all__ = ["seat_metrics"]


def seat_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the conversations of each seat, as ``seat/NAME/...``.

    ``reward/mean``, and ``reward/std``, the mean over groups of the population standard deviation in the group;
    ``turns``, ``sampled`` (tokens) and ``conversations`` of a rollout; ``over/REASON``, the share that ended so.
    """
    numbers: dict[str, float] = {}
    for seat in sorted({sample.seat for sample in samples if sample.seat}):
        members = [sample for sample in samples if sample.seat == seat]
        conversations = by_conversation(members)
        found = {
            "reward/mean": statistics.fmean(_rewards(members)),
            "reward/std": statistics.fmean(statistics.pstdev(_rewards(group)) for group in by_comparison(members)),
            "turns": statistics.fmean(sum(sample.turns for sample in one) for one in conversations),
            "sampled": statistics.fmean(sum(sample.sampled_tokens for sample in one) for one in conversations),
            "conversations": len(conversations) / len({sample.rollout_id for sample in members}),
        }
        ends = Counter(reason.value for one in conversations if (reason := one[-1].stop_reason) is not None)
        found |= {f"over/{name}": count / len(conversations) for name, count in sorted(ends.items())}
        numbers |= {f"seat/{seat}/{name}": value for name, value in found.items()}
    return numbers


def _rewards(samples: Sequence[Sample]) -> list[float]:
    return [reward_of_rollout(branches) or 0.0 for branches in by_conversation(samples)]
