"""The numbers of each batch of one run: of its samples, and of the run since the batch before.

Invariant: each interval between two batches is in one report: idle seconds, lengths and means over slots count from one
batch to the next. This module does not know how a batch is filled.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rollouts.concurrency.boundary import abandoned
from rollouts.concurrency.cancellation import left_behind
from rollouts.training.config import RolloutConfig
from rollouts.training.failures import FailureStats
from rollouts.training.ledger import Ledger
from rollouts.training.metrics import Accounting, IdleClock, batch_metrics
from rollouts.training.slots import Slots
from rollouts.training.staleness import Staleness
from rollouts.training.types import Sample

if TYPE_CHECKING:
    from rollouts.training.length_bias import LengthBias

__all__ = ["BatchReport"]


@attrs.define(eq=False)
class BatchReport:
    """Measures one run from batch to batch."""

    config: RolloutConfig
    ledger: Ledger
    staleness: Staleness
    failures: FailureStats
    slots: Slots
    idle: IdleClock = attrs.field(factory=IdleClock)
    """The seconds in which no group is in flight."""

    @functools.cached_property
    def length_bias(self) -> LengthBias:
        """The bias of dropping groups for their age."""
        from rollouts.training.length_bias import LengthBias  # here: most runs drop none for its age

        return LengthBias()

    def of_samples(self, samples: Sequence[Sample], waited: float | None) -> dict[str, float]:
        """Check and pack the samples of a batch; return its numbers, and the idle seconds of a stream.

        Args:
            samples: the batch.
            waited: seconds that the caller of a stream waited for it; ``None`` without a stream.

        Raises:
            ConfigError: a sample does not pack, or a token has a version that was never announced.
        """
        collects = gc.isenabled()
        gc.disable()  # a burst of objects that are freed at once would start a collection of all young ones
        try:
            numbers = batch_metrics(map(Sample.pack, samples)) | self.staleness.metrics(samples)
        finally:
            if collects:
                gc.enable()
        if self.staleness.drops:
            self.length_bias.trained.add(self.config.batch_size, samples)
            numbers |= self.length_bias.metrics()
        if waited is not None:
            numbers |= {"idle/trainer_seconds": waited, "idle/generator_seconds": self.idle.take()}
        return numbers

    def of_run(self, accounting: Accounting) -> dict[str, Any]:
        """Return the numbers of the run since the batch before, and where its prompts are with this batch."""
        return {
            **self.ledger.totals.take_lengths(),
            **self.failures.metrics(),
            **self.slots.take_metrics(self.config.in_flight or self.config.max_inflight_rollouts),
            "abandoned_threads": len(abandoned()),
            "abandoned_coroutines": len(left_behind()),
            **{f"prompts/{name}": count for name, count in attrs.asdict(accounting).items()},
            **self.ledger.sampler_metrics(),
        }
