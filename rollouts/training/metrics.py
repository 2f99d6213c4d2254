"""Numbers of a run: where every prompt went, and what the rollouts were like.

Invariant: the accounting adds up at every moment:
``taken = in_batch + dropped + failed + returned + ready + in_flight``.

This module counts what it is told; it schedules nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from rollouts.errors import TokenMismatchError
from rollouts.training.types import Group, Sample

__all__ = ["Accounting", "RunMetrics", "batch_metrics"]


@attrs.define
class Accounting:
    """Where the groups taken from the buffer are."""

    taken: int = 0
    in_flight: int = 0
    ready: int = 0
    """Accepted, waiting for a batch."""
    in_batch: int = 0
    dropped: int = 0
    """Rejected by the filter."""
    failed: int = 0
    returned: int = 0
    """Handed back to the buffer unfinished."""

    def check(self) -> None:
        """Raise if the numbers do not add up."""
        if self.taken != self.in_batch + self.dropped + self.failed + self.returned + self.ready + self.in_flight:
            raise TokenMismatchError(f"the accounting does not add up: {self}")

    def __str__(self) -> str:
        parts = [f"{self.in_batch} in batch", f"{self.dropped} dropped", f"{self.failed} failed"]
        parts += [f"{self.returned} returned"]
        parts += [f"{self.ready} ready"] if self.ready else []
        parts += [f"{self.in_flight} in flight"] if self.in_flight else []
        return f"{self.taken} prompts taken = " + " + ".join(parts)


class RunMetrics:
    """What the settled groups of a run were like; feeds the live display and ``metrics.jsonl``."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.sampled_tokens = 0
        self.rollouts = 0
        self.reward_sum = 0.0
        self.rewarded = 0
        self.reasons: Counter[str] = Counter()
        """Why groups were dropped or failed."""
        self._lengths: dict[str, list[int]] = {}

    @property
    def mean_reward(self) -> float | None:
        """Over every scored rollout, kept or not."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of settled groups over wall time."""
        return self.sampled_tokens / max(time.monotonic() - self.started, 1e-9)

    def add(self, group: Group) -> None:
        """Count a settled group."""
        if group.outcome != "kept":
            self.reasons[group.reason] += 1
        for sample in group.samples:
            trained = int(sample.mask_column.sum())
            self.sampled_tokens += trained
            self.rollouts += 1
            self._lengths.setdefault(group.outcome, []).append(trained)
            if isinstance(sample.reward, int | float) and math.isfinite(sample.reward):
                self.reward_sum += sample.reward
                self.rewarded += 1

    def take_lengths(self) -> dict[str, float]:
        """Mean sampled tokens of a rollout by outcome since the last call: does what is kept differ from the rest?"""
        lengths, self._lengths = self._lengths, {}
        means = {f"sampled_tokens/{outcome}": statistics.fmean(values) for outcome, values in sorted(lengths.items())}
        every = [length for values in lengths.values() for length in values]
        return {**means, "sampled_tokens/all": statistics.fmean(every)} if every else means


def batch_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over a batch: reward, lengths, and everything that the episodes counted."""
    if not samples:
        return {}
    numbers = {
        "reward/mean": _mean(sample.reward or 0.0 for sample in samples),
        "reward/std": statistics.pstdev(sample.reward or 0.0 for sample in samples),
        "tokens/mean": _mean(len(sample) for sample in samples),
        "response_length/mean": _mean(sample.response_length for sample in samples),
        "response_length/max": max(sample.response_length for sample in samples),
        "sampled_tokens/mean": _mean(int(sample.mask_column.sum()) for sample in samples),
        "turns/mean": _mean(len(sample.calls) for sample in samples),
        "policy_versions": len({version for sample in samples for version in sample.weight_versions}),
    }
    for status, count in sorted(Counter(sample.status.value for sample in samples).items()):
        numbers[f"status/{status}"] = count / len(samples)
    prompted = sum(call.start for sample in samples for call in sample.calls)
    if prompted:
        cached = sum(call.cached_tokens for sample in samples for call in sample.calls)
        numbers["prefix_cache_hit_rate"] = cached / prompted
    numbers["forks"] = sum(sample.metrics.get("forks", 0) for sample in samples)
    duplicated = sum(sample.metrics.get("duplicated_tokens", 0) for sample in samples)
    numbers["duplicated_tokens"] = duplicated
    numbers["duplicated_tokens/share"] = duplicated / max(sum(len(sample) for sample in samples), 1)
    for name in sorted({name for sample in samples for name in sample.metrics}):
        numbers[f"episode/{name}"] = _mean(sample.metrics.get(name, 0.0) for sample in samples)
    return numbers


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
