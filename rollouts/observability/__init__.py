"""Metrics and traces of an active run; off by default, and without writes on the hot path."""

from rollouts.observability.lag import LoopLag
from rollouts.observability.numbers import numbers_of

__all__ = ["LoopLag", "numbers_of"]
