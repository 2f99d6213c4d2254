"""The bias of dropping groups for their age: a group is as slow as its longest rollout, so long ones are dropped.

This module only counts. It warns once, in the log, when the figure is clear.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import attrs

from rollouts.training.types import Sample

__all__ = ["LengthBias"]

_log = logging.getLogger(__name__)

_CLEAR = 0.95
_ENOUGH = 20
"""Groups that were dropped, before a warning."""


@attrs.define
class Counts:
    """Groups, and the sampled tokens of their rollouts."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0

    def add(self, groups: int, samples: Collection[Sample]) -> None:
        """Count some groups with all their samples."""
        self.groups += groups
        self.samples += len(samples)
        self.tokens += sum(sample.sampled_tokens for sample in samples)


@attrs.define
class LengthBias:
    """Sampled tokens of the rollouts in batches, and of those in groups that were too old."""

    trained: Counts = attrs.field(factory=Counts)
    dropped: Counts = attrs.field(factory=Counts)
    _warned: bool = False

    def metrics(self) -> dict[str, float]:
        """The share of groups that were too old, and the mean length in batches over that of all; over the run."""
        trained, dropped = self.trained, self.dropped
        if not trained.tokens:
            return {}
        share = dropped.groups / (dropped.groups + trained.groups)
        mean = (trained.tokens + dropped.tokens) / (trained.samples + dropped.samples)
        length = trained.tokens / trained.samples / mean
        if length < _CLEAR and dropped.groups >= _ENOUGH and not self._warned:
            self._warned = True
            _log.warning(
                "max_staleness drops long groups: %.0f %% of the groups were too old, and a rollout in a batch has "
                "%.0f tokens, %.2f of the mean of all. Choose over_sampling_factor <= (max_staleness + 1) / 2, or "
                'policy="pace", which drops none',
                100 * share,
                trained.tokens / trained.samples,
                length,
            )
        return {"staleness/dropped": share, "staleness/length": length}
