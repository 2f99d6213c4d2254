"""Reduction of an episode's step rewards to one number.

Invariant: pure; appends the further reward, then reduces, then applies the bounds. This module does not know samples.
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
    """Compute the reward of an episode.

    Args:
        rewards: rewards of its steps; without any, the reward is 0 before the bounds.
        reduction: how they are reduced to one number.
        further: one more reward, e.g. a penalty for an episode that a limit cut.
        lowest: lower bound of the result.
        highest: upper bound of the result.
    """
    counted = [*rewards] if further is None else [*rewards, further]
    value = float(REDUCTIONS[reduction](counted)) if counted else 0.0
    value = value if lowest is None else max(value, lowest)
    return value if highest is None else min(value, highest)
