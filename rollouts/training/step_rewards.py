"""One number from the rewards of an episode's steps.

Invariant: pure; first the further reward, then the reduction, then the bounds. It knows no sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

__all__ = ["REDUCTIONS", "Reduction", "reduced"]

Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]

REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "mean": statistics.fmean,
    "max": max,
    "min": min,
}


def reduced(
    rewards: Sequence[float],
    *,
    reduction: Reduction = "sum",
    further: float | None = None,
    lowest: float | None = None,
    highest: float | None = None,
) -> float:
    """The reward of an episode.

    Args:
        rewards: of its steps; without any it is 0 before the bounds.
        reduction: how they become one.
        further: counted with them, e.g. a penalty for an episode that came to no end.
        lowest: the result is at least this.
        highest: and at most that.
    """
    counted = [*rewards] if further is None else [*rewards, further]
    value = float(REDUCTIONS[reduction](counted)) if counted else 0.0
    value = value if lowest is None else max(value, lowest)
    return value if highest is None else min(value, highest)
