"""Advice to a run whose rollouts mostly wait for the slowest one of their group, or that drops nearly all groups.

A batch takes about G / (factor - 0.45) seconds, where G is the mean time of a group, until every rollout that may run
does; and its groups are factor - 1 versions old on average. Both were measured on a simulated clock with
``scripts/bench slots``, and the second is Little's law.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rollouts.base.terminal import visible
from rollouts.training.config import RolloutConfig
from rollouts.training.manager import AsyncRolloutManager

__all__ = ["slots_advice", "unkept_advice"]

_BUSY = 0.5
_READY = 0.45
"""Batches' worth of groups that are ready on average, and wait for their batch."""


def slots_advice(config: RolloutConfig, batches: Sequence[Mapping[str, float]]) -> str:
    """Advice from the metrics of the first batches; empty if half of the rollouts that may run do.

    The first batch does not count: it starts with nothing in flight.
    """
    shares = [batch["slots/busy"] for batch in batches[1:] if batch.get("slots/busy")]
    if not shares or config.n_samples_per_prompt == 1:
        return ""
    busy, most = statistics.fmean(shares), config.in_flight or config.max_inflight_rollouts
    if busy >= _BUSY:
        return ""
    factor = config.over_sampling_factor
    full = _READY + (factor - _READY) / busy
    better = min(max(3.0, 2 * factor), round(full, 1))
    return (
        f"{busy:.0%} of the {most} rollouts that may run do: the others wait for the slowest of their group. "
        f"in_flight={most} with over_sampling_factor={better:g}: about {(better - _READY) / (factor - _READY):.1f} × "
        f"faster, groups {better - 1:.2g} versions old on average (rollouts plan RUN)"
    )


def unkept_advice(manager: AsyncRolloutManager) -> str:
    """Advice to a run that has dropped nearly all of its groups so far."""
    numbers = manager.run_metrics
    reasons = "; ".join(f"{count} × {visible(reason)}" for reason, count in numbers.reasons.most_common(2))
    mean = "unknown" if numbers.mean_reward is None else f"{numbers.mean_reward:.4g}"
    counts, allowed = manager.accounting, manager.config.rejections_allowed
    kept = counts.in_batch + counts.ready
    return (
        f"{kept} of {kept + counts.dropped} groups are kept so far ({reasons}); the mean reward of {numbers.rollouts} "
        f'rollouts is {mean}. keep="all" of agent_recipe, in place of a filter, keeps such groups; the built-in model, '
        f"which runs without --endpoint have, solves calculator problems alone. After {allowed} in a row the run stops"
    )
