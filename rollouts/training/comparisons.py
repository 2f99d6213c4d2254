"""The conversations of rollouts of several agents, and which rewards are compared with each other.

A rollout is one conversation, or several of several seats. A conversation is one sample, or its branches where it
forked.

Invariant: each sample belongs to one conversation of one rollout and to one comparison, and the order of the samples is
kept. This module is loaded on use; the manager does not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rollouts.errors import ConfigError
from rollouts.training.branches import rollout_keys

if TYPE_CHECKING:
    from rollouts.training.sample import Sample

__all__ = ["Comparison", "by_comparison", "by_conversation", "comparison_keys", "conversation_keys", "seat_of"]

Comparison: TypeAlias = "str | Mapping[str, str]"
"""Which rewards of a group are compared: ``"seat"``, those of one seat; ``"episode"``, those of one seat in one
rollout, e.g. of solvers whose problem their rollout proposed; ``"group"``, all. A mapping names the comparison of some
seats; the others have ``"seat"``."""


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
    return [(*key, *seat_of(sample)) for key, sample in zip(rollout_keys(samples), samples, strict=True)]


def seat_of(sample: Any) -> tuple[str, int]:
    """The seat of a sample and the number of its conversation; a sample of slime has them in its metadata."""
    seat = getattr(sample, "seat", None)
    if seat is not None:
        return seat, sample.conversation
    metadata = sample.metadata or {}
    return metadata.get("seat") or "", metadata.get("conversation") or 0


def comparison_keys(samples: Sequence[Sample], by: Comparison = "seat") -> list[tuple[Any, ...]]:
    """Key of the samples with which the reward of each sample is compared.

    Raises:
        ConfigError: ``by`` is not a :data:`Comparison`.
    """
    found = []
    for key, sample in zip(rollout_keys(samples), samples, strict=True):
        seat, _ = seat_of(sample)
        kind = by if isinstance(by, str) else by.get(seat, "seat")
        if kind not in _COMPARED:
            raise ConfigError.of("by", by, f"one of {tuple(_COMPARED)}, or one for each seat")
        found.append((sample.group_index, *_COMPARED[kind](key, seat)))
    return found


_COMPARED: Mapping[str, Callable[[tuple[str, int], str], tuple[Any, ...]]] = {
    "seat": lambda rollout, seat: (seat,),
    "episode": lambda rollout, seat: (rollout, seat),
    "group": lambda rollout, seat: (),
}
