"""Levels of generated tasks: the level rises as the policy solves it.

A task generator has a difficulty, which its prompts carry in their metadata. Groups come from the current level; every
``review``-th one comes from the levels below, in turn, so that they are not forgotten. The level changes by the mean
reward of its last ``window`` groups.

Invariant: within a level each prompt is drawn once before any is drawn again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.base.validators import is_int, is_number
from rollouts.dtypes import Prompt
from rollouts.dtypes.messages import ENVIRONMENT
from rollouts.errors import ConfigError
from rollouts.training.data_buffer import shuffled

__all__ = ["LevelSampler"]


class LevelSampler:
    """Draws from one level of difficulty, and changes it by the rewards.

    Args:
        key: the metadata of a prompt have its level under this name: a number, larger for harder tasks.
        window: groups of the current level before it may change.
        rise_at: the mean reward of the window at which the next level begins.
        fall_at: the mean reward at which the level before begins.
        review: every ``review``-th draw is from a level below; 0 for none.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self, *, key: str = "level", window: int = 16, rise_at: float = 0.75, fall_at: float = 0.1, review: int = 5
    ) -> None:
        if not is_int(window, 1) or not is_int(review, 0):
            raise ConfigError.of("LevelSampler.window, LevelSampler.review", (window, review), "integers >= 1 and >= 0")
        if not (is_number(rise_at) and is_number(fall_at)) or fall_at >= rise_at:
            got = (fall_at, rise_at)
            raise ConfigError.of("LevelSampler.fall_at, LevelSampler.rise_at", got, "two numbers, the lower one first")
        self.key, self.window, self.rise_at, self.fall_at, self.review = key, window, rise_at, fall_at, review

    def begin(self, prompts: Sequence[Prompt], seed: int | None) -> None:
        levels: dict[float, list[int]] = {}
        for position, prompt in enumerate(prompts):
            level = prompt.metadata.get(self.key)
            if not is_number(level):
                raise ConfigError.of(f"prompts[{position}].metadata[{self.key!r}]", level, "a number, its level")
            levels.setdefault(level, []).append(position)
        environments = {prompt.metadata.get(ENVIRONMENT) for prompt in prompts}
        if len(environments) > 1:
            raise ConfigError.of("LevelSampler", sorted(map(str, environments)), "prompts of one environment")
        self._seed = seed
        self._levels = sorted(levels)
        self._positions = [levels[level] for level in self._levels]
        self._level_of = {position: number for number, each in enumerate(self._positions) for position in each}
        self._taken = [0] * len(self._levels)
        """Draws of each level."""
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._level = 0
        self._means: list[float] = []

    def next(self, draw: int) -> int:
        level = self._level
        if self.review and level and draw % self.review == self.review - 1:
            level = draw // self.review % level
        return self._take(level)

    def drawn(self, draw: int, position: int) -> None:
        level = self._level_of[position]
        for _ in self._positions[level]:
            if self._take(level) == position:
                return

    def _take(self, level: int) -> int:
        positions = self._positions[level]
        number, place = divmod(self._taken[level], len(positions))
        self._taken[level] += 1
        if place == 0 or (level, number) not in self._orders:
            self._orders.pop((level, number - 1), None)
            self._orders[level, number] = shuffled(len(positions), self._seed, number)
        return positions[self._orders[level, number][place]]

    def observe(self, position: int, rewards: Sequence[float | None]) -> None:
        known = [reward for reward in rewards if reward is not None]
        if self._level_of[position] != self._level or not known:
            return
        self._means = [*self._means, statistics.fmean(known)][-self.window :]
        if len(self._means) < self.window:
            return
        mean = statistics.fmean(self._means)
        change = (mean >= self.rise_at and self._level < len(self._levels) - 1) - (
            mean <= self.fall_at and self._level > 0
        )
        if change:
            self._level, self._means = self._level + change, []

    def metrics(self) -> Mapping[str, float]:
        """The current level."""
        return {"level": self._levels[self._level]}

    def describe(self) -> dict[str, Any]:
        return {"name": type(self).__name__, **{name: getattr(self, name) for name in _NUMBERS}}

    def state_dict(self) -> dict[str, Any]:
        return {"level": self._level, "means": list(self._means), "taken": list(self._taken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._level, self._means, self._taken = state["level"], list(state["means"]), list(state["taken"])


_NUMBERS = ("key", "window", "rise_at", "fall_at", "review")
