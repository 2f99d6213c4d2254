"""Metrics and traces of an active run; off by default, and without writes on the hot path."""

from typing import TYPE_CHECKING

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
    from rollouts.observability.lag import LoopLag
    from rollouts.observability.loggers import MLflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger
    from rollouts.observability.numbers import numbers_of
    from rollouts.observability.run_logger import RunLogger

__all__ = ["LoopLag", "MLflowLogger", "RunLogger", "TensorBoardLogger", "TrackioLogger", "WandbLogger", "numbers_of"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.observability.lag": ("LoopLag",),
        "rollouts.observability.loggers": ("MLflowLogger", "TensorBoardLogger", "TrackioLogger", "WandbLogger"),
        "rollouts.observability.numbers": ("numbers_of",),
        "rollouts.observability.run_logger": ("RunLogger",),
    },
)
