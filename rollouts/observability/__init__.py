"""Metrics and traces of an active run; off by default, and without writes on the hot path."""

from rollouts.observability.lag import LoopLag
from rollouts.observability.loggers import MLflowLogger, RunLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from rollouts.observability.numbers import numbers_of

__all__ = [
    "LoopLag",
    "MLflowLogger",
    "RunLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "numbers_of",
]
