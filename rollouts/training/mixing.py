"""Training on several environments at once: prompts mixed by weight, and a reward function for each environment.

Invariant: after any number of prompts, the count of each environment differs from its share by less than one prompt.
Batch metrics contain the values of each environment under ``environment/NAME/``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from rollouts.base.validators import is_int, is_number
from rollouts.dtypes import Prompt
from rollouts.dtypes.messages import ENVIRONMENT
from rollouts.errors import ConfigError, RewardFailure
from rollouts.training.scoring import reward_of
from rollouts.training.types import RewardFn, Sample

__all__ = ["MixedReward", "mixed_prompts"]

_SECONDS = 3600.0
"""Deadline of one reward; longer than ``reward_seconds`` of the run, which applies first."""


def mixed_prompts(parts: Mapping[str, tuple[float, Iterable[Prompt]]], count: int, *, seed: int = 0) -> list[Prompt]:
    """Take ``count`` prompts from the parts in proportion to their weights, evenly interleaved.

    Pass them to a ``DataBuffer`` without a seed, which keeps their order. A part with too few prompts is repeated, each
    time in another order.

    Args:
        parts: weight and prompts, by the name of the environment.
        count: total number of prompts.
        seed: seed of the order within each part.

    Raises:
        ConfigError: no parts, a count below 1, a weight that is not above 0, or a part without prompts.
    """
    if not parts:
        raise ConfigError.of("mixed_prompts(parts)", parts, "at least one, by the name of its environment")
    if not is_int(count, 1):
        raise ConfigError.of("mixed_prompts(count)", count, "an integer >= 1")
    sources = {}
    for name, (weight, prompts) in parts.items():
        if not is_number(weight) or weight <= 0:
            raise ConfigError.of(f"mixed_prompts(parts)[{name!r}]", weight, "a weight above 0")
        listed = list(prompts)
        if not listed:
            raise ConfigError.of(f"mixed_prompts(parts)[{name!r}]", listed, "at least one prompt")
        sources[name] = _endless(name, listed, seed)
    total = sum(weight for weight, _ in parts.values())
    taken = dict.fromkeys(parts, 0)
    mixed = []
    for number in range(1, count + 1):
        # The part that is furthest behind its share; the first one on a tie.
        name = max(parts, key=lambda part: parts[part][0] / total * number - taken[part])
        taken[name] += 1
        mixed.append(next(sources[name]))
    return mixed


def _endless(name: str, prompts: list[Prompt], seed: int) -> Any:
    rng = random.Random(f"{seed}/{name}")
    while True:
        rng.shuffle(prompts)
        for prompt in prompts:
            yield attrs.evolve(prompt, metadata={**prompt.metadata, ENVIRONMENT: name})


class MixedReward:
    """A ``reward_fn`` that calls the reward function of the sample's environment.

    Args:
        rewards: reward functions by the name of the environment; ``None`` uses the sum of its step rewards.
    """

    def __init__(self, rewards: Mapping[str, RewardFn | None]) -> None:
        for name, reward_fn in rewards.items():
            if reward_fn is not None and not callable(reward_fn):
                raise ConfigError.of(f"MixedReward[{name!r}]", reward_fn, "a reward_fn, or None")
        self.rewards = dict(rewards)

    def __repr__(self) -> str:
        return f"<MixedReward of {', '.join(self.rewards)}>"

    async def __call__(self, sample: Sample) -> Any:
        """Score the sample with the reward function of its environment.

        Raises:
            RewardFailure: the environment has no entry in ``rewards``, or its function failed.
        """
        name = sample.metadata.get(ENVIRONMENT)
        if name not in self.rewards:
            raise RewardFailure(f"metadata[{ENVIRONMENT!r}]: got {name!r}; expected one of {sorted(self.rewards)}")
        reward_fn = self.rewards[name]
        return sample.reward if reward_fn is None else await reward_of(sample, reward_fn, seconds=_SECONDS)
