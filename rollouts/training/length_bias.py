"""The bias of dropping groups for their age: a group is as slow as its longest rollout, so long ones are dropped.

This module only counts. It warns once, in the log, when the figure is clear.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import attrs

from rollouts.training.types import Sample

__all__ = ["LengthBias"]

_log = logging.getLogger(__name__)

_CLEAR = 0.95
_ENOUGH = 20
"""Groups that were dropped, before a warning."""


@attrs.define
class LengthBias:
    """Sampled tokens of the rollouts in batches, and of those in groups that were too old."""

    trained_groups: int = 0
    trained_samples: int = 0
    trained_tokens: int = 0
    dropped_groups: int = 0
    dropped_samples: int = 0
    dropped_tokens: int = 0
    _warned: bool = False

    def trained(self, groups: int, samples: Iterable[Sample]) -> None:
        """Count the groups of a batch."""
        self.trained_groups += groups
        for sample in samples:
            self.trained_samples += 1
            self.trained_tokens += sample.sampled_tokens

    def dropped(self, samples: Iterable[Sample]) -> None:
        """Count a group that was too old."""
        self.dropped_groups += 1
        for sample in samples:
            self.dropped_samples += 1
            self.dropped_tokens += sample.sampled_tokens

    def metrics(self) -> dict[str, float]:
        """The share of groups that were too old, and the mean length in batches over that of all; over the run."""
        tokens, samples = self.trained_tokens + self.dropped_tokens, self.trained_samples + self.dropped_samples
        if not self.trained_tokens:
            return {}
        share = self.dropped_groups / (self.dropped_groups + self.trained_groups)
        length = self.trained_tokens / self.trained_samples / (tokens / samples)
        if length < _CLEAR and self.dropped_groups >= _ENOUGH and not self._warned:
            self._warned = True
            _log.warning(
                "max_staleness drops long groups: %.0f %% of the groups were too old, and a rollout in a batch has "
                "%.0f tokens, %.2f of the mean of all. Choose over_sampling_factor <= (max_staleness + 1) / 2, or "
                'policy="pace", which drops none',
                100 * share,
                self.trained_tokens / self.trained_samples,
                length,
            )
        return {"staleness/dropped": share, "staleness/length": length}
