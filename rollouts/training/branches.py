"""The rollouts of a list of samples: a rollout is one sample, or its branches where it forked.

Invariant: each sample belongs to one rollout, and the order of the samples is kept. This module does not load
the class of samples, so that a filter is cheap to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollouts.base.validators import finite

if TYPE_CHECKING:
    from rollouts.training.sample import Sample

__all__ = ["by_rollout", "reward_of_rollout", "rollout_keys"]


def by_rollout(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The branches of each rollout, in order; a sample without ``rollout_id`` is a separate rollout."""
    rollouts: dict[tuple[str, int], list[Sample]] = {}
    for key, sample in zip(rollout_keys(samples), samples, strict=True):
        rollouts.setdefault(key, []).append(sample)
    return list(rollouts.values())


def rollout_keys(samples: Sequence[Sample]) -> list[tuple[str, int]]:
    """Key of each sample's rollout: ``rollout_id``, or the position among ``samples`` if it is ``None``."""
    return [
        ("place", number) if sample.rollout_id is None else ("rollout", sample.rollout_id)
        for number, sample in enumerate(samples)
    ]


def reward_of_rollout(branches: Sequence[Sample]) -> float | None:
    """The mean reward of the branches of a rollout, mostly the reward of each; ``None`` if a branch has no reward."""
    if len(branches) == 1:
        return branches[0].reward
    rewards = [reward for branch in branches if (reward := finite(branch.reward)) is not None]
    return sum(rewards) / len(rewards) if len(rewards) == len(branches) else None
