"""Batches of a service as :class:`~rollouts.training.Sample` objects, for a trainer's adapter in its process.

Invariant: the samples equal those of the same run in one process, byte for byte in columns, as plain data in fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from rollouts.service.client import Batch, Rollouts
from rollouts.service.wire import read_lease
from rollouts.training.types import Sample

__all__ = ["SampleBatch", "sample_batches"]


@attrs.frozen(eq=False)
class SampleBatch:
    """Whole groups that a trainer has leased."""

    batch: Batch
    samples: Sequence[Sample]

    def ack(self, step: int | None = None) -> None:
        """As :meth:`rollouts.service.client.Batch.ack`."""
        self.batch.ack(step)


def sample_batches(service: Rollouts, groups: int, *, lease_seconds: float = 600.0) -> Iterator[SampleBatch]:
    """Yield batches as :meth:`rollouts.service.client.Rollouts.batches` does, with the same errors."""
    for batch in service.batches(groups, lease_seconds=lease_seconds):
        yield SampleBatch(batch, read_lease(batch.body).samples)
