"""Metrics of a run: the accounting of prompts, totals over groups, and means over a batch.

Invariant: the accounting adds up at every moment:
``taken = in_batch + dropped + failed + returned + ready + in_flight``.

This module only counts; it schedules nothing.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import attrs

from rollouts.dtypes.messages import ENVIRONMENT, REPLIES, Prompt
from rollouts.errors import ConfigError, TokenMismatchError
from rollouts.training.types import Group, Outcome, Sample, by_rollout, reward_of_rollout

__all__ = ["Accounting", "BatchMetrics", "IdleClock", "RunMetrics"]


@attrs.define
class Accounting:
    """Number of groups in each state, of those taken from the buffer."""

    taken: int = 0
    in_flight: int = 0
    ready: int = 0
    """Accepted, and not in a batch yet."""
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


_TOTALS = ("sampled_tokens", "rollouts", "reward_sum", "rewarded")
_MAX_REASONS = 200
_OTHER_REASONS = "other reasons"


class RunMetrics:
    """Totals over the settled groups of a run, for the live display and ``metrics.jsonl``."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.sampled_tokens = 0
        self.rollouts = 0
        self.reward_sum = 0.0
        self.rewarded = 0
        self.reasons: Counter[str] = Counter()
        """Number of dropped or failed groups by reason; rare ones are joined once there are ``_MAX_REASONS``."""
        self._lengths: dict[str, list[int]] = {}
        self._loaded_tokens = 0

    @property
    def mean_reward(self) -> float | None:
        """Mean over every scored rollout, kept or not; ``None`` if there is none."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    @property
    def sampled_here(self) -> int:
        """Sampled tokens of the groups that this process settled; a resumed run has more."""
        return self.sampled_tokens - self._loaded_tokens

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of the groups that this process settled, per second of wall time."""
        return self.sampled_here / max(time.monotonic() - self.started, 1e-9)

    def add(self, group: Group) -> None:
        """Count a settled group."""
        self.count(group.outcome, group.reason, group.rollout_lengths, group.rollout_rewards)

    def count(self, outcome: Outcome, reason: str, lengths: Sequence[int], rewards: Sequence[float | None]) -> None:
        """Count a settled group by its rollouts' sampled tokens and rewards."""
        if outcome != "kept":
            self.reasons[reason] += 1
            if len(self.reasons) > _MAX_REASONS:  # texts with an id or a value of the group are all different
                kept = Counter(dict(self.reasons.most_common(_MAX_REASONS // 2)))
                kept[_OTHER_REASONS] += self.reasons.total() - kept.total()
                self.reasons = kept
        self.sampled_tokens += sum(lengths)
        self.rollouts += len(lengths)
        self._lengths.setdefault(outcome, []).extend(lengths)
        for reward in rewards:
            if isinstance(reward, int | float) and math.isfinite(reward):
                self.reward_sum += reward
                self.rewarded += 1

    def to_dict(self) -> dict[str, Any]:
        """The totals as plain values."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _TOTALS}
        lengths = {outcome: list(lengths) for outcome, lengths in self._lengths.items()}
        return {**values, "reasons": dict(self.reasons), "lengths": lengths}

    def load(self, totals: Mapping[str, Any]) -> None:
        """Restore the totals that :meth:`to_dict` returned."""
        for name in _TOTALS:
            setattr(self, name, totals[name])
        self._loaded_tokens = self.sampled_tokens
        self.reasons = Counter(totals["reasons"])
        self._lengths = {outcome: list(lengths) for outcome, lengths in totals["lengths"].items()}

    def take_lengths(self) -> dict[str, float]:
        """Return the mean sampled tokens of a rollout by outcome since the last call; they show a bias in length."""
        lengths, self._lengths = self._lengths, {}
        means = {f"sampled_tokens/{outcome}": fmean(values) for outcome, values in sorted(lengths.items())}
        total = [length for values in lengths.values() for length in values]
        return {**means, "sampled_tokens/all": fmean(total)} if total else means


class IdleClock:
    """Adds up the seconds during which no group was in flight."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start counting: no group is in flight."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Stop counting: a group was started."""
        self._seconds += 0.0 if self._since is None else time.monotonic() - self._since
        self._since = None

    def take(self) -> float:
        """Return the idle seconds since the last call."""
        idle = self._since is not None
        self.stop()
        seconds, self._seconds = self._seconds, 0.0
        if idle:
            self.start()
        return seconds


class BatchMetrics:
    """Means over a batch: reward, lengths, the counters of the episodes, and the same by environment.

    Rewards, statuses, turns, sampled tokens and counters are those of rollouts, however many branches they have;
    lengths of sequences are those of samples, whose groups follow each other. A reward that is not finite is refused.
    """

    def __init__(self) -> None:
        self._samples, self._groups = list[Sample](), dict[int | None, Sample]()  # few objects for the collector
        self._rewards, self._statuses, self._lengths = list[float](), list[str](), list[int]()
        self._counters, self._versions = defaultdict[str, list[float]](list), set[str]()
        self._sums = (0, 0, 0, 0, 0)  # tokens, sampled, turns, tokens of prompts, cached ones of them

    def add(self, samples: Iterable[Sample]) -> None:
        """Add whole groups."""
        counters, (tokens, sampled, turns, prompt_tokens, cached) = self._counters, self._sums
        for index, members in itertools.groupby(samples, operator.attrgetter("group_index")):
            self._samples += (group := [*members])
            self._groups.setdefault(index, group[0])
            for one in by_rollout(group):  # a group is in the CPU's cache once
                self._rewards.append(reward_of_rollout(one) or 0.0)
                self._statuses.append(one[-1].status.value)
                for name, value in (one[0].metrics if len(one) == 1 else _counters(one)).items():
                    counters[name].append(value)
                for sample in one:
                    records, (length, trained, response) = sample.compact or sample, sample.sizes
                    self._lengths.append(response)
                    tokens, sampled, cached = tokens + length, sampled + trained, cached + records.prefix[1]
                    prompt_tokens += records.prefix[0]
                    turns += records.turns or int(sample.metrics.get(REPLIES, 0))
                    self._versions.update(records.weight_versions)
        self._sums = (tokens, sampled, turns, prompt_tokens, cached)

    def numbers(self) -> dict[str, float]:
        """Compute the means over all that was added, at least one group."""
        rewards, lengths, rollouts = self._rewards, self._lengths, len(self._rewards)
        tokens, sampled, turns, prompt_tokens, cached = self._sums
        if wrong := [*itertools.filterfalse(math.isfinite, rewards)]:
            raise ConfigError.of("Sample.reward", wrong[0], "a finite number")
        numbers = {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        numbers |= {"tokens/mean": tokens / len(lengths), "response_length/mean": sum(lengths) / len(lengths)}
        numbers |= {"response_length/max": max(lengths), "sampled_tokens/mean": sampled / rollouts}
        numbers |= {"turns/mean": turns / rollouts, "policy_versions": len(self._versions)}
        for status, count in sorted(Counter(self._statuses).items()):
            numbers[f"status/{status}"] = count / rollouts
        if prompt_tokens:
            numbers["prefix_cache_hit_rate"] = cached / prompt_tokens
        equal = len({repr((sample.prompt, sample.label)) for sample in self._groups.values()}) < len(self._groups)
        if equal and (repeated := len(self._groups) - len({_task_of(sample) for sample in self._groups.values()})):
            numbers["repeated_prompts"] = repeated
        numbers["forks"], duplicated = (sum(self._counters.get(name, ())) for name in ("forks", "duplicated_tokens"))
        numbers |= {"duplicated_tokens": duplicated, "duplicated_tokens/share": duplicated / max(tokens, 1)}
        for name, metric in (("continued", "turns_before_resume"), ("restarted", "restarted_at_resume")):
            numbers[f"resumed/{name}"] = len(self._counters.get(metric, ()))
        for name, values in sorted(self._counters.items()):
            numbers[f"episode/{name}"] = math.fsum(values) / rollouts
        if [sample for sample in self._samples if ENVIRONMENT in sample.metadata]:
            from rollouts.training.environment_metrics import environment_metrics  # most runs have one environment

            numbers |= environment_metrics(by_rollout(self._samples))
        if [sample for sample in self._samples if sample.seat]:
            from rollouts.training.seat_metrics import seat_metrics  # most runs have one agent

            numbers |= seat_metrics(self._samples)
        return numbers


def _counters(branches: Sequence[Sample]) -> dict[str, float]:
    """The counters of a rollout; the number of attempts is that of the rollout, and stands in each branch."""
    names = {name for branch in branches for name in branch.metrics}
    values = {name: [branch.metrics[name] for branch in branches if name in branch.metrics] for name in names}
    return {name: max(found) if name == "attempts" else sum(found) for name, found in values.items()}


def _task_of(sample: Sample) -> str:
    """Equal for prompts with one text and label; without an opening, for those with one metadata, if it is known."""
    metadata = None if Prompt(sample.prompt).has_opening else sample.metadata or sample.group_index
    return repr((sample.prompt, sample.label, metadata))
