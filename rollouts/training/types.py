"""Groups of samples, and the types of the functions that users write.

This module does not know how samples are generated, scored or filtered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeAlias

import attrs

from rollouts.dtypes import Prompt
from rollouts.training.branches import by_rollout, reward_of_rollout, rollout_keys
from rollouts.training.sample import ImageInputs, Sample
from rollouts.training.status import Status

__all__ = [
    "FilterFn",
    "GenerateFn",
    "Group",
    "GroupRewardFn",
    "ImageInputs",
    "Outcome",
    "Prompt",
    "RewardFn",
    "Sample",
    "Status",
    "by_rollout",
    "reward_of_rollout",
    "rollout_keys",
]

Outcome: TypeAlias = Literal["kept", "dropped", "failed"]
"""Outcome of a group: accepted by the filter, rejected by the filter, or lost to a failure."""


@attrs.frozen
class Group:
    """All rollouts of one prompt, with their outcome."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """In order of ``index``; a failed group may lack some."""
    outcome: Outcome
    reason: str = ""
    """Why it was dropped or failed."""

    @property
    def group_index(self) -> int:
        assert self.prompt.group_index is not None  # set by the buffer
        return self.prompt.group_index

    @property
    def rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.samples]

    @property
    def rollout_rewards(self) -> list[float | None]:
        """The reward of each rollout, however many branches it has."""
        return [reward_of_rollout(branches) for branches in by_rollout(self.samples)]

    @property
    def rollout_lengths(self) -> list[int]:
        """The sampled tokens of each rollout."""
        return [sum([branch.sampled_tokens for branch in branches]) for branches in by_rollout(self.samples)]


GenerateFn: TypeAlias = Callable[[Sequence[Prompt]], Awaitable[Sequence[Sample]]]
"""Generates one rollout for each prompt, in order; a rollout that forks is several samples with one ``rollout_id``."""

RewardFn: TypeAlias = Callable[[Sample], float | Awaitable[float]]
"""Scores a sample. A sync function runs in a thread."""

GroupRewardFn: TypeAlias = Callable[[list[Sample]], Sequence[float] | Awaitable[Sequence[float]]]
"""With ``group_rm``: takes the group and returns one reward for each sample. A sync function runs in a thread."""

FilterFn: TypeAlias = Callable[[list[Sample]], bool | Awaitable[bool]]
"""Keeps (True) or drops (False) a scored group; pure. May also return an object with ``keep`` and ``reason``, such as
slime's ``DynamicFilterOutput``."""
