"""The numbers of each batch of one run: of its samples, and of the run since the batch before.

Invariant: each interval between two batches is in one report: idle seconds, lengths and means over slots count from one
batch to the next. This module does not know how a batch is filled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import attrs

from rollouts.concurrency.boundary import abandoned
from rollouts.concurrency.cancellation import left_behind
from rollouts.training.config import RolloutConfig
from rollouts.training.failures import FailureStats
from rollouts.training.ledger import Ledger
from rollouts.training.metrics import Accounting, BatchMetrics, IdleClock
from rollouts.training.slots import Slots
from rollouts.training.staleness import Staleness
from rollouts.training.types import Group, Sample

if TYPE_CHECKING:
    from rollouts.training.length_bias import LengthBias

__all__ = ["BatchReport"]

SAMPLES_A_TURN = 1024  # samples that are sealed in one turn of the event loop: about 20 ms


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

    async def of_groups(self, groups: Sequence[Group]) -> dict[str, float]:
        """Check, pack and count the samples of a batch; other tasks run between parts of a large one."""
        batch = BatchMetrics()
        for start in range(0, len(groups), size := SAMPLES_A_TURN // self.config.n_samples_per_prompt or 1):
            if start:
                await anyio.lowlevel.checkpoint()
            batch.add(map(Sample.pack, [sample for group in groups[start : start + size] for sample in group.samples]))
        return batch.numbers()

    def of_run(self, samples: Sequence[Sample], waited: float | None, accounting: Accounting) -> dict[str, Any]:
        """Return the numbers of the run since the batch before, and where its prompts are with this batch.

        ``waited`` is the time in seconds that the caller of a stream waited for it; ``None`` without a stream.
        """
        numbers: dict[str, Any] = self.staleness.metrics(samples)
        if self.staleness.drops:
            self.length_bias.trained.add(self.config.batch_size, samples)
            numbers |= self.length_bias.metrics()
        if (sampler := self.ledger.data_buffer.sampler) is not None:
            from rollouts.training.samplers.base import sampler_metrics  # here: most runs have none

            numbers |= sampler_metrics(sampler, self.ledger.data_buffer.ask_sampler("metrics"))
        if waited is not None:
            numbers |= {"idle/trainer_seconds": waited, "idle/generator_seconds": self.idle.take()}
        return {
            **numbers,
            **self.ledger.totals.take_lengths(),
            **self.failures.metrics(),
            **self.slots.take_metrics(self.config.in_flight or self.config.max_inflight_rollouts),
            "abandoned_threads": len(abandoned()),
            "abandoned_coroutines": len(left_behind()),
            **{f"prompts/{name}": count for name, count in attrs.asdict(accounting).items()},
        }
