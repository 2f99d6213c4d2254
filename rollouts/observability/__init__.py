"""What a run costs and waits for, told to others: off until asked for, and then read, never written on the hot path."""

from rollouts.observability.lag import LoopLag
from rollouts.observability.numbers import numbers_of

__all__ = ["LoopLag", "numbers_of"]
