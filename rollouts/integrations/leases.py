"""The batches that adapters of trainers lease, as a protocol; ``rollouts.service.batches`` has such batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollouts.training.types import Sample

__all__ = ["LeasedBatch"]


class LeasedBatch(Protocol):
    """Whole groups that the trainer must acknowledge."""

    @property
    def samples(self) -> Sequence[Sample]: ...

    def ack(self, step: int | None = None) -> None: ...
