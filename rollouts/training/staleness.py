"""How old the weights are that sampled a token, and what is done about groups that are too old to train on.

Staleness counts versions: how many were announced after the one that sampled a token. That of a group is that of its
oldest token. Two policies keep it at or below a bound, and a stream of batches follows one of them:

- ``drop``: generation runs as far ahead as ``over_sampling_factor`` allows; a group that is too old when a batch is
  asked for is dropped, and counted.
- ``pace``: nothing is ever dropped for its age. No more groups are started than can be handed out in time, and a batch
  waits for groups that would otherwise come too late.

Invariant of ``pace``: before each announcement at most ``max_staleness`` batches' worth of groups are pending, and of
those that have only j announcements left at most j batches' worth; so no group in a batch is older than the bound, as
long as whoever trains announces at most one version for each batch.

This module starts nothing, waits for nothing, and knows no weights: it is told their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import attrs

from rollouts.errors import ConfigError
from rollouts.training.types import Group, Sample

__all__ = ["Staleness", "StalenessPolicy"]

StalenessPolicy: TypeAlias = Literal["drop", "pace"]


def _policy(instance: object, field: attrs.Attribute[str], value: object) -> None:
    if value not in get_args(StalenessPolicy):
        raise ConfigError.of(field.name, value, f"one of {get_args(StalenessPolicy)}")


def _bound(instance: object, field: attrs.Attribute[int | None], value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigError.of(field.name, value, "an integer >= 0, or None for no bound")


@attrs.define
class Staleness:
    """The versions of one run, in order, and the rule for what is too old."""

    max_staleness: int | None = attrs.field(default=None, validator=_bound)
    """Versions between the weights that sampled a token and those that are being trained."""
    policy: StalenessPolicy = attrs.field(default="drop", validator=_policy)
    training: bool = False
    """Whether somebody holds a batch and has announced nothing since: another version is about to come."""
    _numbers: dict[str, int] = attrs.field(factory=dict)

    @property
    def current(self) -> int:
        """How many versions were announced so far."""
        return len(self._numbers)

    @property
    def paced(self) -> bool:
        return self.policy == "pace" and self.max_staleness is not None

    def announce(self, version: str) -> None:
        """Say that ``version`` is served from now on.

        Raises:
            ConfigError: the name was used before: tokens of the two could not be told apart.
        """
        if version in self._numbers:
            raise ConfigError.of("version", version, f"a new name, unlike the {self.current} announced before")
        self._numbers[version] = len(self._numbers) + 1
        self.training = False

    # -- how old --

    def tokens_by_age(self, samples: Iterable[Sample]) -> Counter[int]:
        """Sampled tokens by staleness; empty where samples tell no version, or none was ever announced.

        Raises:
            ConfigError: a token of a version that was never announced, so that its age is unknown.
        """
        tokens: Counter[int] = Counter()
        if not self._numbers:
            return tokens
        for sample in samples:
            for span in sample.read("versions"):
                number = self._numbers.get(span.version)
                if number is None:
                    known = list(self._numbers)[-3:]
                    raise ConfigError.of("Sample.versions", span.version, f"a version that was announced, as {known}")
                tokens[self.current - number] += span.stop - span.start
        return tokens

    def age(self, group: Group) -> int:
        """Staleness of the group's oldest token."""
        return max(self.tokens_by_age(group.samples), default=0)

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Mean and maximum over sampled tokens, and the share of each age."""
        tokens = self.tokens_by_age(samples)
        total = tokens.total()
        if not total:
            return {}
        shares = {f"staleness/{age}": count / total for age, count in sorted(tokens.items())}
        mean = sum(age * count for age, count in tokens.items()) / total
        return {"staleness/mean": mean, "staleness/max": max(tokens), **shares}

    # -- what is done about it --

    @property
    def drops(self) -> bool:
        """Whether a group can be too old."""
        return self.policy == "drop" and self.max_staleness is not None

    def too_old(self, group: Group) -> bool:
        return self.drops and self.age(group) > (self.max_staleness or 0)

    def room(self, pending: int, batch_size: int) -> int | None:
        """How many more groups may be started beside ``pending`` ones; ``None`` for no bound of this kind."""
        if not self.paced or self.max_staleness is None:
            return None
        return (self.max_staleness + 1 - self.training) * batch_size - pending

    def choose(self, ready: Sequence[Group], started: Mapping[int, int], batch_size: int) -> list[Group] | None:
        """The groups of the next batch, by group index; ``None`` if it must wait for one that is in flight.

        Args:
            ready: accepted groups.
            started: of each group in flight, :attr:`current` when it was started.
            batch_size: groups of a batch.
        """
        if len(ready) < batch_size:
            return None
        ages = {group.group_index: self.age(group) for group in ready} if self.paced else {}
        oldest_first = sorted(ready, key=lambda group: (-ages.get(group.group_index, 0), group.group_index))
        chosen, rest = oldest_first[:batch_size], oldest_first[batch_size:]
        if self.paced and started and self.max_staleness is not None:
            pending = [ages[group.group_index] for group in rest]
            pending += [self.current - version for version in started.values()]
            for left in range(self.max_staleness + 1):  # announcements that a group may still see after this batch
                if sum(age >= self.max_staleness - left for age in pending) > left * batch_size:
                    return None
        return sorted(chosen, key=lambda group: group.group_index)
