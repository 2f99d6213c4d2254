"""Calls of a user's reward function, and checks of its result.

Invariant: after :func:`score` a sample has a finite float reward, or a :class:`RewardFailure` was raised; a late or
invalid reward never becomes a number. A sync function runs in a worker thread, so it cannot block the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollouts.base.validators import finite
from rollouts.concurrency.boundary import call_foreign, function_name
from rollouts.concurrency.times import now
from rollouts.errors import RewardFailure, shortened
from rollouts.training.types import Sample

__all__ = ["reward_of", "rewards_of", "score", "score_group"]


async def score(sample: Sample, reward_fn: Callable[..., Any] | None, *, seconds: float) -> None:
    """Set ``sample.reward``; without a function, check the reward that generation set.

    Raises:
        RewardFailure: the function raised, exceeded ``seconds``, or returned no finite number.
    """
    if reward_fn is None:
        sample.reward = _finite(sample.reward, "the rollout itself (no reward_fn is set)")
        return
    name = function_name(reward_fn)
    began, times = now(), sample.times  # user code may replace it
    try:
        answer = await call_foreign(RewardFailure, f"reward {name}", reward_fn, sample, seconds=seconds)
        sample.reward = _finite(answer, name)
    finally:
        times.add("reward", name, began, now() - began)


async def score_group(samples: Sequence[Sample], reward_fn: Callable[..., Any], *, seconds: float) -> None:
    """Set the rewards of a whole group with one call: ``reward_fn(samples)`` returns one number for each sample.

    Raises:
        RewardFailure: as :func:`score`, or the number of rewards differs from the number of samples.
    """
    began, timelines = now(), [sample.times for sample in samples]
    try:
        rewards = await rewards_of(samples, reward_fn, seconds=seconds)
    finally:
        for times in timelines:
            times.add("reward", function_name(reward_fn), began, now() - began)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


async def reward_of(sample: Sample, reward_fn: Callable[..., Any], *, seconds: float) -> float:
    """Return the reward of a sample, and leave ``sample.reward`` unchanged; raises as :func:`score`."""
    name = function_name(reward_fn)
    return _finite(await call_foreign(RewardFailure, f"reward {name}", reward_fn, sample, seconds=seconds), name)


async def rewards_of(samples: Sequence[Sample], reward_fn: Callable[..., Any], *, seconds: float) -> list[float]:
    """Return the rewards of a group, and leave its samples unchanged; raises as :func:`score_group`."""
    name = function_name(reward_fn)
    values = await call_foreign(RewardFailure, f"group reward {name}", reward_fn, list(samples), seconds=seconds)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RewardFailure(f"group reward {name}: got {shortened(values)}; expected a list of {len(samples)} numbers")
    if len(values) != len(samples):
        raise RewardFailure(f"group reward {name} returned {len(values)} rewards for {len(samples)} samples")
    return [_finite(value, name) for value in values]


def _finite(value: Any, source: str) -> float:
    number = finite(value)
    if number is None:
        raise RewardFailure(f"reward from {source}: got {shortened(value)}; expected a finite number")
    return number
