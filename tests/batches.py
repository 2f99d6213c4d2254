"""The numbers of a batch."""

from __future__ import annotations

from collections.abc import Iterable

from rollouts.training.metrics import BatchMetrics
from rollouts.training.types import Sample

__all__ = ["batch_metrics"]


def batch_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """The numbers of samples that are counted at once."""
    batch = BatchMetrics()
    batch.add(samples)
    return batch.numbers()
