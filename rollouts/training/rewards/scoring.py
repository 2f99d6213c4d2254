"""Rewards: run a user's scoring function over samples, and put what it says on them.

Invariant: after :func:`score` every sample has a finite float reward, or a typed failure was raised; a late or broken
reward is never turned into a number. A sync function runs in a worker thread, so it cannot stall the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollouts.concurrency.boundary import call_foreign, function_name
from rollouts.dtypes import finite
from rollouts.errors import RewardFailure, shortened
from rollouts.training.types import Sample

__all__ = ["reward_of", "rewards_of", "score", "score_group"]


async def score(sample: Sample, reward_fn: Callable[..., Any] | None, *, seconds: float) -> None:
    """Set ``sample.reward``; without a function, check the one that generation set.

    Raises:
        RewardFailure: the function raised, overran ``seconds``, or gave no finite number.
    """
    if reward_fn is None:
        sample.reward = _finite(sample.reward, "the rollout itself (no reward_fn is set)")
        return
    sample.reward = await reward_of(sample, reward_fn, seconds=seconds)


async def score_group(samples: Sequence[Sample], reward_fn: Callable[..., Any], *, seconds: float) -> None:
    """Set the rewards of a whole group with one call: ``reward_fn(samples)`` gives one number for each.

    Raises:
        RewardFailure: as :func:`score`, or the number of rewards differs from the number of samples.
    """
    rewards = await rewards_of(samples, reward_fn, seconds=seconds)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


async def reward_of(sample: Sample, reward_fn: Callable[..., Any], *, seconds: float) -> float:
    """What a function says of a sample, which keeps the reward that it has; raises as :func:`score`."""
    name = function_name(reward_fn)
    return _finite(await call_foreign(RewardFailure, f"reward {name}", reward_fn, sample, seconds=seconds), name)


async def rewards_of(samples: Sequence[Sample], reward_fn: Callable[..., Any], *, seconds: float) -> list[float]:
    """What a function says of a group, whose samples keep the rewards that they have; raises as :func:`score_group`."""
    name = function_name(reward_fn)
    values = await call_foreign(RewardFailure, f"group reward {name}", reward_fn, list(samples), seconds=seconds)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RewardFailure(f"group reward {name}: got {shortened(values)}; expected a list of {len(samples)} numbers")
    if len(values) != len(samples):
        raise RewardFailure(f"group reward {name} gave {len(values)} rewards for {len(samples)} samples")
    return [_finite(value, name) for value in values]


def _finite(value: Any, source: str) -> float:
    number = finite(value)
    if number is None:
        raise RewardFailure(f"reward from {source}: got {shortened(value)}; expected a finite number")
    return number
