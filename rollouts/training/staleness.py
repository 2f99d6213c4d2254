"""Staleness of groups, and the two policies that bound it.

The staleness of a token is the number of policy versions after the one that sampled it. The staleness of a group is
the staleness of its oldest token. A stream of batches uses one of two policies to keep it within a bound:

- ``drop``: generation runs as far ahead as ``over_sampling_factor`` allows; a group that is too old when a batch is
  requested is dropped and counted.
- ``pace``: no group is dropped for its age. Only as many groups are started as can be trained in time, and a batch
  waits for groups in flight that would otherwise become too old.

Invariant of ``pace``: before each announcement at most ``max_staleness`` batches' worth of groups are pending, and at
most j batches' worth of them have only j announcements left. So no group in a batch exceeds the bound, as long as the
trainer announces at most one version for each batch.

This module starts no groups, never waits, and knows weights only by the names of their versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import attrs

from rollouts.base.validators import is_int
from rollouts.errors import ConfigError
from rollouts.training.types import Group, Sample

__all__ = ["Staleness", "StalenessPolicy"]

StalenessPolicy: TypeAlias = Literal["drop", "pace"]


def _policy(instance: object, field: attrs.Attribute[str], value: object) -> None:
    if value not in get_args(StalenessPolicy):
        raise ConfigError.of(field.name, value, f"one of {get_args(StalenessPolicy)}")


def _bound(instance: object, field: attrs.Attribute[int | None], value: object) -> None:
    if value is not None and not is_int(value, 0):
        raise ConfigError.of(field.name, value, "an integer >= 0, or None for no bound")


@attrs.define
class Staleness:
    """The policy versions of one run in order, the bound on staleness and its policy.

    Versions are announced by the trainer, or else observed.
    """

    max_staleness: int | None = attrs.field(default=None, validator=_bound)
    """Maximum number of versions between the weights that sampled a token and the current ones; ``None``: no bound."""
    policy: StalenessPolicy = attrs.field(default="drop", validator=_policy)
    training: bool = False
    """Whether the trainer has a batch and has not announced the next version yet."""
    _numbers: dict[str, int] = attrs.field(factory=dict)

    @property
    def current(self) -> int:
        """Number of versions announced so far."""
        return len(self._numbers)

    @property
    def paced(self) -> bool:
        return self.policy == "pace" and self.max_staleness is not None

    def announce(self, version: str) -> None:
        """Record that the server uses ``version`` from now on.

        Raises:
            ConfigError: the name was used before, so tokens of the two versions could not be distinguished.
        """
        if version in self._numbers:
            raise ConfigError.of("version", version, f"a new name, unlike the {self.current} announced before")
        self._numbers[version] = len(self._numbers) + 1
        self.training = False

    def observe(self, versions: Iterable[str], *, earlier: bool = False) -> None:
        """Record versions that are not announced, but named by servers and tokens.

        Names that are all numbers, as of servers that count, are in the order of their values. Others are in the order
        in which they are observed; with ``earlier`` before all known ones.
        """
        new = [name for name in dict.fromkeys(versions) if name not in self._numbers]
        if not new:
            return
        names = [*new, *self._numbers] if earlier else [*self._numbers, *new]
        if all(name.isdecimal() for name in names):
            names.sort(key=int)
        self._numbers = {name: number for number, name in enumerate(names, 1)}

    # -- measuring --

    def tokens_by_age(self, samples: Iterable[Sample]) -> Counter[int]:
        """Count sampled tokens by staleness; empty if samples have no versions, or none was announced.

        Raises:
            ConfigError: a token has a version that was never announced.
        """
        tokens: Counter[int] = Counter()
        if not self._numbers:
            return tokens
        for sample in samples:
            if len(names := sample.weight_versions) == 1:  # of all its sampled tokens
                tokens[self._age(names[0])] += sample.sampled_tokens
                continue
            for span in sample.read_record("versions"):
                tokens[self._age(span.version)] += span.stop - span.start
        return tokens

    def _age(self, version: str) -> int:
        number = self._numbers.get(version)
        if number is None:
            known = list(self._numbers)[-3:]
            raise ConfigError.of("Sample.versions", version, f"a version that was announced, as {known}")
        return self.current - number

    def age_of(self, versions: Iterable[str]) -> int:
        """Staleness of the oldest of some versions; 0 if there is none, or none was announced.

        Raises:
            ConfigError: one was never announced.
        """
        return max(map(self._age, versions), default=0) if self._numbers else 0

    def age(self, group: Group) -> int:
        """Staleness of the group's oldest token."""
        return self.age_of(version for sample in group.samples for version in sample.weight_versions)

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Mean and maximum staleness of sampled tokens, and the share of each value."""
        tokens = self.tokens_by_age(samples)
        total = tokens.total()
        if not total:
            return {}
        shares = {f"staleness/{age}": count / total for age, count in sorted(tokens.items())}
        mean = sum(age * count for age, count in tokens.items()) / total
        return {"staleness/mean": mean, "staleness/max": max(tokens), **shares}

    # -- enforcing the bound --

    @property
    def drops(self) -> bool:
        """Whether groups that are too old are dropped."""
        return self.policy == "drop" and self.max_staleness is not None

    def too_old(self, age: int) -> bool:
        """Whether a group of this age is dropped."""
        return self.drops and age > (self.max_staleness or 0)

    def room(self, pending: int, batch_size: int) -> int | None:
        """Return how many groups may be started in addition to ``pending`` ones; ``None`` without a ``pace`` bound."""
        if not self.paced or self.max_staleness is None:
            return None
        return (self.max_staleness + 1 - self.training) * batch_size - pending

    def choose(self, ready: Sequence[Group], started: Mapping[int, int], batch_size: int) -> list[Group] | None:
        """Return the groups of the next batch by group index; ``None`` if the batch must wait for a group in flight.

        Args:
            ready: accepted groups.
            started: groups in flight by index, with the value of :attr:`current` at their start.
            batch_size: number of groups in a batch.
        """
        if len(ready) < batch_size:
            return None
        ages = {group.group_index: self.age(group) for group in ready} if self.paced else {}
        oldest_first = sorted(ready, key=lambda group: (-ages.get(group.group_index, 0), group.group_index))
        chosen, rest = oldest_first[:batch_size], oldest_first[batch_size:]
        if self.paced and started and self.max_staleness is not None:
            pending = [ages[group.group_index] for group in rest]
            pending += [self.current - version for version in started.values()]
            for left in range(self.max_staleness + 1):  # announcements that a pending group can still see in time
                if sum(age >= self.max_staleness - left for age in pending) > left * batch_size:
                    return None
        return sorted(chosen, key=lambda group: group.group_index) if ages else chosen
