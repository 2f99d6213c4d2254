"""Failure policies, and statistics of lost attempts.

Invariant: every lost attempt is counted by cause, and its length is compared with those of sound attempts, so that a
bias of the training data shows. A policy never turns a failure into a reward, and never makes a group smaller. This
module decides and counts; the group runner and the manager act.
"""

from __future__ import annotations

import random
import re
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from rollouts.base.validators import integer, seconds
from rollouts.errors import CAUSES, ConfigError, Failure
from rollouts.training.types import Sample

__all__ = ["FailurePolicy", "FailureStats", "cause_of", "check_policies", "same_cause"]


@attrs.frozen(kw_only=True)
class FailurePolicy:
    """The reaction to one cause of failure, in this order: retry, replace the rollout, drop the group or stop."""

    attempts: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Maximum attempts at a rollout, each with a fresh environment; the config's ``max_attempts`` by default."""
    backoff_seconds: float = attrs.field(default=0.0, validator=seconds(least=0))
    """Pause before the second attempt; doubles with each further one, times a random factor from 0.5 to 1."""
    most_seconds: float = attrs.field(default=60.0, validator=seconds(least=0))
    """Maximum pause."""
    replacements: int = attrs.field(default=0, validator=integer(0))
    """How often a rollout that is lost for good is replaced by a newly sampled one."""
    min_sound: int = attrs.field(default=0, validator=integer(0))
    """Replace only in a group with at least this many sound rollouts."""
    then: Literal["drop_group", "stop"] | None = None
    """After the last retry and replacement: record the group as failed, or stop the run; default ``on_failure``."""

    def __attrs_post_init__(self) -> None:
        if self.then not in ("drop_group", "stop", None):
            raise ConfigError.of("FailurePolicy.then", self.then, '"drop_group", "stop" or None')

    def pause(self, attempt: int, rng: random.Random) -> float:
        """Return the seconds to wait after attempt ``attempt`` failed."""
        longest = min(self.most_seconds, self.backoff_seconds * 2.0 ** min(attempt - 1, 60))
        return rng.uniform(longest / 2, longest)


def check_policies(policies: Mapping[str, FailurePolicy]) -> None:
    """Raise a :class:`ConfigError` for an unknown cause, or a value that is not a :class:`FailurePolicy`."""
    for cause, policy in policies.items():
        if cause not in CAUSES:
            raise ConfigError.of("RolloutConfig.failures", cause, f"one of {', '.join(CAUSES)}")
        if not isinstance(policy, FailurePolicy):
            raise ConfigError.of(f"RolloutConfig.failures[{cause!r}]", policy, "a FailurePolicy")


def same_cause(failure: Failure) -> str:
    """The kind and message of a failure without quoted values and numbers, equal for failures with the same cause."""
    return f"{failure.kind}: {_VALUES.sub('…', failure.message)}"


_VALUES = re.compile(r"""(?<=: got ).{0,200}?(?=; expected)|'[^']*'|"[^"]*"|0x[0-9a-f]+|\d+""")


def cause_of(samples: Sequence[Sample]) -> str:
    """Cause of a lost rollout: that of its first failure, else ``"generate"``."""
    return next((sample.failure.cause for sample in samples if sample.failure is not None), "generate")


class FailureStats:
    """Counts lost and sound attempts.

    Args:
        budget: share of the last ``window`` attempts that may be lost; ``None`` for no limit.
        window: number of attempts that the share refers to.
    """

    def __init__(self, budget: float | None, window: int) -> None:
        self._budget = budget
        self._last: deque[str | None] = deque(maxlen=window)
        self.lost: Counter[str] = Counter()
        """Lost attempts by cause."""
        self.prompts: Counter[str] = Counter()
        """Lost attempts by prompt, cut to 80 characters."""
        self.replaced = 0
        self.sound = 0
        """Sound attempts."""
        self._lengths: dict[bool, list[int]] = {True: [], False: []}
        self._turns: dict[bool, list[int]] = {True: [], False: []}

    def add(self, samples: Sequence[Sample], *, sound: bool) -> None:
        """Count one attempt."""
        cause = None if sound else cause_of(samples)
        self._last.append(cause)
        self.sound += sound
        if cause is not None:
            self.lost[cause] += 1
            self.prompts[str(samples[0].prompt)[:80]] += 1
        self._lengths[sound].append(sum([sample.sampled_tokens for sample in samples]))
        self._turns[sound].append(sum([sample.turns for sample in samples]))

    def overdrawn(self) -> str | None:
        """Return a message with the top causes if the budget is exceeded, else ``None``; then the window restarts."""
        if self._budget is None or len(self._last) < (self._last.maxlen or 0):
            return None
        causes = Counter(cause for cause in self._last if cause is not None)
        if (lost := causes.total()) <= self._budget * len(self._last):
            return None
        top = ", ".join(f"{count} × {cause}" for cause, count in causes.most_common(3))
        self._last.clear()
        return f"{lost} of the last {self._last.maxlen} attempts were lost, more than {self._budget:.0%}: {top}"

    def metrics(self) -> dict[str, float]:
        """Lost attempts by cause, since the run began; mean lengths of lost and sound ones, since the last call."""
        numbers: dict[str, float] = {f"lost/{cause}": count for cause, count in sorted(self.lost.items())}
        if self.lost:
            numbers |= {"lost/attempts": self.lost.total(), "lost/prompts": len(self.prompts)}
            numbers["lost/replaced"] = self.replaced
        for name, columns in (("sampled_tokens", self._lengths), ("turns", self._turns)):
            if columns[False]:
                for sound, what in ((True, "sound"), (False, "lost")):
                    if columns[sound]:
                        numbers[f"{name}/{what}"] = statistics.fmean(columns[sound])
            columns[True], columns[False] = [], []
        return numbers
