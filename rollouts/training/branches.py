"""The rollouts of a list of samples, their conversations, and which rewards are compared with each other.

A rollout is one conversation, or one of each seat and more in a game of several agents. A conversation is one sample,
or its branches where it forked.

Invariant: each sample belongs to one conversation of one rollout, and the order of the samples is kept. This module
does not load the class of samples, so that a filter is cheap to import.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rollouts.base.validators import finite
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.training.sample import Sample

__all__ = [
    "Comparison",
    "by_comparison",
    "by_conversation",
    "by_rollout",
    "comparison_keys",
    "conversation_keys",
    "reward_of_rollout",
    "rollout_keys",
]

Comparison: TypeAlias = "str | Mapping[str, str]"
"""Which rewards of a group are compared: ``"seat"``, those of one seat; ``"episode"``, those of one seat in one
rollout, e.g. of solvers whose problem their rollout proposed; ``"group"``, all. A mapping names the comparison of some
seats; the others have ``"seat"``."""


def by_rollout(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each rollout, in order; a sample without ``rollout_id`` is a separate rollout."""
    return _by(rollout_keys(samples), samples)


def by_conversation(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The branches of each conversation, in order of its first; without seats, those of each rollout."""
    return _by(conversation_keys(samples), samples)


def by_comparison(samples: Sequence[Sample], by: Comparison = "seat") -> list[list[Sample]]:
    """The samples whose rewards are compared with each other, in order of the first of each comparison."""
    return _by(comparison_keys(samples, by), samples)


def _by(keys: Sequence[Hashable], samples: Sequence[Sample]) -> list[list[Sample]]:
    members: dict[Hashable, list[Sample]] = {}
    for key, sample in zip(keys, samples, strict=True):
        members.setdefault(key, []).append(sample)
    return list(members.values())


def conversation_keys(samples: Sequence[Sample]) -> list[tuple[Any, ...]]:
    """Key of each sample's conversation: its rollout, its seat, and its number among those of the seat."""
    return [
        (*key, sample.seat, sample.conversation) for key, sample in zip(rollout_keys(samples), samples, strict=True)
    ]


def comparison_keys(samples: Sequence[Sample], by: Comparison = "seat") -> list[tuple[Any, ...]]:
    """Key of the samples with which the reward of each sample is compared.

    Raises:
        ConfigError: ``by`` is not a :data:`Comparison`.
    """
    found = []
    for key, sample in zip(rollout_keys(samples), samples, strict=True):
        kind = by if isinstance(by, str) else by.get(sample.seat, "seat")
        if kind not in _COMPARED:
            raise ConfigError.of("by", by, f"one of {tuple(_COMPARED)}, or one for each seat")
        found.append((sample.group_index, *_COMPARED[kind](key, sample.seat)))
    return found


_COMPARED: Mapping[str, Callable[[tuple[str, int], str], tuple[Any, ...]]] = {
    "seat": lambda rollout, seat: (seat,),
    "episode": lambda rollout, seat: (rollout, seat),
    "group": lambda rollout, seat: (),
}


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
