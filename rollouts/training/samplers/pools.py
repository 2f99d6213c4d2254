"""Pools of prompts by the mean reward of their last group, each with a share of the passes over the data.

The idea is prime-rl's (``DifficultyPoolSampler``): prompts that are mostly solved or mostly failed are drawn less often
than the others. Here a pool's weight is the share of the passes in which its prompts are drawn
(:mod:`rollouts.training.samplers.passes`), so that no prompt is left out for long, and none is drawn twice in a pass.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.base.validators import is_number
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.training.samplers.passes import PassSampler

__all__ = ["PoolSampler"]


class PoolSampler(PassSampler):
    """Draws prompts that are hard, and prompts that are easy, in a share of the passes; the others in each.

    Args:
        hard: the highest mean reward of a hard prompt.
        easy: the lowest mean reward of an easy prompt.
        hard_share: the share of the passes in which a hard prompt is drawn.
        easy_share: the same of an easy prompt.

    Raises:
        ConfigError: a share is not above 0 and at most 1, or ``hard`` is not below ``easy``.
    """

    def __init__(
        self, *, hard: float = 0.25, easy: float = 0.75, hard_share: float = 0.2, easy_share: float = 0.2
    ) -> None:
        for name, value in (("hard_share", hard_share), ("easy_share", easy_share)):
            if not is_number(value) or not 0 < value <= 1:
                raise ConfigError.of(f"PoolSampler.{name}", value, "a number above 0, at most 1")
        if not (is_number(hard) and is_number(easy)) or hard >= easy:
            raise ConfigError.of("PoolSampler.hard, PoolSampler.easy", (hard, easy), "two numbers, the lower one first")
        self.hard, self.easy = hard, easy
        self.shares = {"hard": hard_share, "normal": 1.0, "easy": easy_share}

    def begin(self, prompts: Sequence[Prompt], seed: int | None) -> None:
        super().begin(prompts, seed)
        self._pools: dict[int, str] = {}
        self._sizes: Counter[str] = Counter()

    def share(self, position: int, number: int) -> float:
        return self.shares[self._pools.get(position, "normal")]

    def observe(self, position: int, rewards: Sequence[float | None]) -> None:
        known = [reward for reward in rewards if reward is not None]
        if not known:
            return
        mean = statistics.fmean(known)
        pool = "hard" if mean <= self.hard else "normal" if mean < self.easy else "easy"
        if position in self._pools:
            self._sizes[self._pools[position]] -= 1
        self._pools[position] = pool
        self._sizes[pool] += 1

    def metrics(self) -> Mapping[str, float]:
        """Prompts tried, by pool, and prompts skipped."""
        return {**{pool: self._sizes[pool] for pool in self.shares}, **super().metrics()}

    def describe(self) -> dict[str, Any]:
        return {
            "name": type(self).__name__,
            "hard": self.hard,
            "easy": self.easy,
            **{f"share/{pool}": share for pool, share in self.shares.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pools": {str(position): pool for position, pool in self._pools.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._pools = {int(position): pool for position, pool in state["pools"].items()}
        self._sizes = Counter(self._pools.values())
