"""What is done about rollouts that fail, and what they have in common.

Invariant: every lost attempt is counted by its cause, with its length beside those of the sound ones, so that a run can
say what it did not train on. A handling never turns a failure into a reward, and never makes a group smaller. This
module decides and counts; the manager acts.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from rollouts.errors import CAUSES, ConfigError
from rollouts.training.types import Sample

__all__ = ["FailurePolicy", "FailureStats", "cause_of", "check_handlings"]


def _count(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    least = 1 if field.name == "attempts" else 0
    if value is None and field.default is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError.of(f"FailurePolicy.{field.name}", value, f"an integer >= {least}")


def _seconds(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ConfigError.of(f"FailurePolicy.{field.name}", value, "a number of seconds >= 0")


@attrs.frozen(kw_only=True)
class FailurePolicy:
    """What to do about one type of failure, in this order: try again, replace the rollout, give the group up, stop."""

    attempts: int | None = attrs.field(default=None, validator=_count)
    """How often a rollout is tried, each time with a fresh environment; the config's ``max_attempts`` by default."""
    backoff_seconds: float = attrs.field(default=0.0, validator=_seconds)
    """Pause before the second attempt; it doubles with each further one, and is drawn between half and whole."""
    most_seconds: float = attrs.field(default=60.0, validator=_seconds)
    """The longest pause."""
    replacements: int = attrs.field(default=0, validator=_count)
    """How often a rollout that is lost for good is replaced by another one, sampled anew, to fill the group."""
    min_sound: int = attrs.field(default=0, validator=_count)
    """Replace only in a group of which so many rollouts are sound."""
    then: Literal["drop_group", "stop"] | None = None
    """When nothing helped: record the group as failed, or stop the run; the config's ``on_failure`` by default."""

    def __attrs_post_init__(self) -> None:
        if self.then not in ("drop_group", "stop", None):
            raise ConfigError.of("FailurePolicy.then", self.then, '"drop_group", "stop" or None')

    def pause(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait after the failure of attempt ``attempt``."""
        most = min(self.most_seconds, self.backoff_seconds * 2.0 ** min(attempt - 1, 60))
        return rng.uniform(most / 2, most)


def check_handlings(handlings: Mapping[str, FailurePolicy]) -> None:
    """Raise a :class:`ConfigError` for a cause that there is not, or what is no handling."""
    for cause, handling in handlings.items():
        if cause not in CAUSES:
            raise ConfigError.of("RolloutConfig.failures", cause, f"one of {', '.join(CAUSES)}")
        if not isinstance(handling, FailurePolicy):
            raise ConfigError.of(f"RolloutConfig.failures[{cause!r}]", handling, "a FailurePolicy")


def cause_of(samples: Sequence[Sample]) -> str:
    """The cause of a lost rollout."""
    return next((sample.failure.cause for sample in samples if sample.failure is not None), "generate")


class FailureStats:
    """Counts lost and sound attempts.

    Args:
        budget: the share of the last ``window`` attempts that may be lost; ``None`` for no end.
        window: how many attempts the share is taken over.
    """

    def __init__(self, budget: float | None, window: int) -> None:
        self._budget = budget
        self._last: deque[str | None] = deque(maxlen=window)
        self.lost: Counter[str] = Counter()
        """Attempts by cause."""
        self.prompts: Counter[str] = Counter()
        """Lost attempts by prompt, shortened."""
        self.replaced = 0
        self._lengths: dict[bool, list[int]] = {True: [], False: []}
        self._turns: dict[bool, list[int]] = {True: [], False: []}

    def add(self, samples: Sequence[Sample], *, sound: bool) -> None:
        """Count one attempt."""
        cause = None if sound else cause_of(samples)
        self._last.append(cause)
        if cause is not None:
            self.lost[cause] += 1
            self.prompts[str(samples[0].prompt)[:80]] += 1
        self._lengths[sound].append(sum([sample.sampled_tokens for sample in samples]))
        self._turns[sound].append(sum([sample.turns for sample in samples]))

    def overdrawn(self) -> str | None:
        """Why the budget is overdrawn, with the top causes; ``None`` while it is not."""
        if self._budget is None or len(self._last) < (self._last.maxlen or 0):
            return None
        causes = Counter(cause for cause in self._last if cause is not None)
        if causes.total() <= self._budget * len(self._last):
            return None
        told = ", ".join(f"{count} × {cause}" for cause, count in causes.most_common(3))
        self._last.clear()
        return (
            f"{causes.total()} of the last {self._last.maxlen} attempts were lost, more than {self._budget:.0%}: {told}"
        )

    def metrics(self) -> dict[str, float]:
        """What was lost since the run began, by cause; and since the last call, how long lost and sound ones are."""
        numbers: dict[str, float] = {f"lost/{cause}": count for cause, count in sorted(self.lost.items())}
        if self.lost:
            numbers |= {"lost/attempts": self.lost.total(), "lost/prompts": len(self.prompts)}
            numbers["lost/replaced"] = self.replaced
        for name, columns in (("sampled_tokens", self._lengths), ("turns", self._turns)):
            if columns[False]:
                for sound, what in ((True, "sound"), (False, "lost")):
                    if columns[sound]:
                        numbers[f"{name}/{what}"] = statistics.fmean(columns[sound])
                    columns[sound] = []
        return numbers
