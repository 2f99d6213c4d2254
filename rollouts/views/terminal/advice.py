"""Advice to a run whose rollouts mostly wait for the slowest one of their group.

A batch takes about G / (factor - 0.45) seconds, where G is the mean time of a group, until every rollout that may run
does; and its groups are factor - 1 versions old on average. Both were measured on a simulated clock with
``scripts/bench slots``, and the second is Little's law.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rollouts.training.config import RolloutConfig

__all__ = ["AFTER", "slots_advice"]

AFTER = 3
"""Batches of a run before the advice; the first one does not count, as it starts with nothing in flight."""
_BUSY = 0.5
_READY = 0.45
"""Batches' worth of groups that are ready on average, and wait for their batch."""


def slots_advice(config: RolloutConfig, batches: Sequence[Mapping[str, float]]) -> str | None:
    """Advice from the metrics of the first batches; ``None`` if half of the rollouts that may run do."""
    shares = [batch["slots/busy"] for batch in batches[1:] if batch.get("slots/busy")]
    if not shares or config.n_samples_per_prompt == 1:
        return None
    busy, most = statistics.fmean(shares), config.in_flight or config.max_inflight_rollouts
    if busy >= _BUSY:
        return None
    factor = config.over_sampling_factor
    full = _READY + (factor - _READY) / busy
    better = min(max(3.0, 2 * factor), round(full, 1))
    return (
        f"{busy:.0%} of the {most} rollouts that may run do: the others wait for the slowest of their group. "
        f"in_flight={most} with over_sampling_factor={better:g}: about {(better - _READY) / (factor - _READY):.1f} × "
        f"faster, groups {better - 1:.2g} versions old on average (rollouts plan RUN)"
    )
