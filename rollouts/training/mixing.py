"""Training on several environments at once: their prompts in proportion, and each with its own reward.

Invariant: after any number of prompts, each environment has had its share to within one prompt. The metrics of a batch
have the numbers of each environment under ``environment/NAME/``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from rollouts.dtypes import Prompt
from rollouts.environments.mixed import ENVIRONMENT
from rollouts.errors import ConfigError, RewardFailure
from rollouts.training.rewards.scoring import reward_of
from rollouts.training.types import RewardFn, Sample

__all__ = ["MixedReward", "mixed_prompts"]

_SECONDS = 3600.0
"""For one reward; ``reward_seconds`` of the run comes first."""


def mixed_prompts(parts: Mapping[str, tuple[float, Iterable[Prompt]]], count: int, *, seed: int = 0) -> list[Prompt]:
    """So many prompts, taken from each part by its weight, evenly spread.

    Give them to a ``DataBuffer`` without a seed, which keeps their order. A part that has too few prompts is gone
    through again, each time in another order; the order of the parts is the same for the same seed.

    Args:
        parts: by the name of their environment, a weight and prompts.
        count: how many in all.
        seed: of the order within each part.

    Raises:
        ConfigError: no parts, a weight that is not above 0, or a part without prompts.
    """
    if not parts:
        raise ConfigError.of("mixed_prompts(parts)", parts, "at least one, by the name of its environment")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError.of("mixed_prompts(count)", count, "an integer >= 1")
    sources = {}
    for name, (weight, prompts) in parts.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ConfigError.of(f"mixed_prompts(parts)[{name!r}]", weight, "a weight above 0")
        held = list(prompts)
        if not held:
            raise ConfigError.of(f"mixed_prompts(parts)[{name!r}]", held, "at least one prompt")
        sources[name] = _endless(name, held, seed)
    total = sum(weight for weight, _ in parts.values())
    taken = dict.fromkeys(parts, 0)
    mixed = []
    for number in range(1, count + 1):
        # The one that is furthest behind its share; of equals the first.
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
    """A ``reward_fn`` that is another one for each environment.

    Args:
        rewards: by the name of the environment; ``None`` takes the sum of its step rewards.
    """

    def __init__(self, rewards: Mapping[str, RewardFn | None]) -> None:
        for name, reward_fn in rewards.items():
            if reward_fn is not None and not callable(reward_fn):
                raise ConfigError.of(f"MixedReward[{name!r}]", reward_fn, "a reward_fn, or None")
        self.rewards = dict(rewards)

    def __repr__(self) -> str:
        return f"<MixedReward of {', '.join(self.rewards)}>"

    async def __call__(self, sample: Sample) -> Any:
        """What the sample's environment says.

        Raises:
            RewardFailure: it has no reward by the name of its environment.
        """
        name = sample.metadata.get(ENVIRONMENT)
        if name not in self.rewards:
            raise RewardFailure(f"metadata[{ENVIRONMENT!r}]: got {name!r}; expected one of {sorted(self.rewards)}")
        reward_fn = self.rewards[name]
        return sample.reward if reward_fn is None else await reward_of(sample, reward_fn, seconds=_SECONDS)
