"""Weighted sums of reward functions, for samples or for groups.

Invariant: a sum includes all parts: if a part fails, the sum is a :class:`RewardFailure` that names the part. Parts run
concurrently, sync ones in worker threads. The value of each part is stored in ``sample.metadata["rewards"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.base.validators import is_number
from rollouts.concurrency.boundary import function_name
from rollouts.concurrency.task_groups import first_error
from rollouts.errors import ConfigError, RewardFailure
from rollouts.training.scoring import reward_of, rewards_of
from rollouts.training.types import RewardFn, Sample

__all__ = ["WeightedGroupSum", "WeightedSum", "brevity", "each"]

_SECONDS = 3600.0
"""Deadline of one part; longer than ``reward_seconds`` of the run, which applies first."""


class WeightedSum:
    """A ``reward_fn``: ``sum(weight * part(sample))``.

    Args:
        parts: weight and ``reward_fn`` (sync or async), by name.

    Raises:
        ConfigError: no parts, or a part that is not a weight and a function.
    """

    def __init__(self, parts: Mapping[str, tuple[float, RewardFn]]) -> None:
        self.parts = _checked("WeightedSum", parts)

    def __repr__(self) -> str:
        return f"<WeightedSum {_describe(self.parts)}>"

    async def __call__(self, sample: Sample) -> float:
        """Return the weighted sum; raise :class:`RewardFailure` if a part failed."""

        async def part(function: Callable[..., Any]) -> list[float]:
            return [await reward_of(sample, function, seconds=_SECONDS)]

        values = await _all_parts(self.parts, part)
        return _summed(self.parts, values, [sample])[0]


class WeightedGroupSum:
    """A group reward (``group_rm=True``) that sums group rewards; :func:`each` converts a ``reward_fn`` to one."""

    def __init__(self, parts: Mapping[str, tuple[float, Callable[..., Any]]]) -> None:
        self.parts = _checked("WeightedGroupSum", parts)

    def __repr__(self) -> str:
        return f"<WeightedGroupSum {_describe(self.parts)}>"

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return one sum for each sample; raises as :class:`WeightedSum`."""

        async def part(function: Callable[..., Any]) -> list[float]:
            return await rewards_of(samples, function, seconds=_SECONDS)

        values = await _all_parts(self.parts, part)
        return _summed(self.parts, values, samples)


def each(reward_fn: RewardFn) -> Callable[[Sequence[Sample]], Any]:
    """Convert a ``reward_fn`` to a group reward that scores all samples of the group concurrently."""

    async def group(samples: Sequence[Sample]) -> list[float]:
        values: dict[int, float] = {}

        async def run(number: int) -> None:
            values[number] = await reward_of(samples[number], reward_fn, seconds=_SECONDS)

        async with first_error() as tasks:
            for number in range(len(samples)):
                tasks.start_soon(run, number)
        return [values[number] for number in range(len(samples))]

    group.__name__ = function_name(reward_fn)
    return group


def brevity(samples: Sequence[Sample]) -> list[float]:
    """A group reward that decreases linearly from 1 for the fewest sampled tokens to 0 for the most.

    If all lengths are equal, each reward is 1.
    """
    lengths = [int(sample.mask_column.sum()) for sample in samples]
    most, least = max(lengths), min(lengths)
    return [1.0 if most == least else (most - length) / (most - least) for length in lengths]


# -- parts ------------------------------------------------------------------------------------------------------------


Part = Callable[[Callable[..., Any]], Any]


async def _all_parts(parts: Mapping[str, tuple[float, Callable[..., Any]]], run: Part) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}

    async def one(name: str, function: Callable[..., Any]) -> None:
        try:
            values[name] = await run(function)
        except RewardFailure as error:
            failure = RewardFailure(f"part {name}: {error}")
            failure.late = error.late
            raise failure from error

    async with first_error() as tasks:
        for name, (_, function) in parts.items():
            tasks.start_soon(one, name, function)
    return values


def _summed(
    parts: Mapping[str, tuple[float, Callable[..., Any]]], values: Mapping[str, list[float]], samples: Sequence[Sample]
) -> list[float]:
    totals = []
    for number, sample in enumerate(samples):
        sample.metadata["rewards"] = {name: values[name][number] for name in parts}
        totals.append(sum(weight * values[name][number] for name, (weight, _) in parts.items()))
    return totals


def _checked(kind: str, parts: Mapping[str, tuple[float, Any]]) -> dict[str, tuple[float, Any]]:
    expected = "a weight and a function by name, e.g. {'correct': (1.0, exact_match)}"
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError.of(f"{kind}.parts", parts, expected)
    for name, part in parts.items():
        sound = isinstance(part, tuple) and len(part) == 2
        if not sound or not is_number(part[0]) or not callable(part[1]):
            raise ConfigError.of(f"{kind}.parts[{name!r}]", part, expected)
    return dict(parts)


def _describe(parts: Mapping[str, tuple[float, Any]]) -> str:
    return " + ".join(f"{weight:g} * {name}" for name, (weight, _) in parts.items())
