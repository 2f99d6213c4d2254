"""The conversations of rollouts of several agents, and which rewards are compared with each other.

A rollout is one conversation, or several of several seats. A conversation is one sample, or its branches where it
forked.

Invariant: each sample belongs to one conversation of one rollout and to one comparison, and the order of the samples is
kept. Its comparison travels with the sample, as ``metadata["seat_comparison"]``, so that the run, its files and each
trainer find the same. This module is loaded on use; the manager does not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rollouts.errors import ConfigError
from rollouts.training.branches import rollout_keys

if TYPE_CHECKING:
    from rollouts.training.sample import Sample

__all__ = [
    "COMPARISON",
    "Comparison",
    "by_comparison",
    "by_conversation",
    "by_key",
    "comparison_keys",
    "comparison_name",
    "comparison_of",
    "conversation_keys",
    "seat_of",
]

T = TypeVar("T")

COMPARISON = "seat_comparison"
"""The entry of the metadata of a sample with a seat that says with which rewards its own is compared: ``"seat"``,
``"episode"`` or ``"group"``. Without it ``"seat"``. A sample of slime has it too."""

Comparison: TypeAlias = "str | Mapping[str, str]"
"""Which rewards of a group are compared: ``"seat"``, those of one seat; ``"episode"``, those of one seat in one
rollout, e.g. of solvers whose problem their rollout proposed; ``"group"``, all. A mapping names the comparison of some
seats; the others have ``"seat"``. ``None`` where a function takes it: as ``metadata["seat_comparison"]`` of each sample
says."""


def by_conversation(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The branches of each conversation, in order of its first; without seats, those of each rollout."""
    return list(by_key(conversation_keys(samples), samples).values())


def by_comparison(samples: Sequence[Sample], by: Comparison | None = None) -> list[list[Sample]]:
    """The samples whose rewards are compared with each other, in order of the first of each comparison."""
    return list(by_key(comparison_keys(samples, by), samples).values())


def by_key(keys: Sequence[Any], values: Sequence[T]) -> dict[Any, list[T]]:
    """The values of each key, in order of the first of each."""
    members: dict[Any, list[T]] = {}
    for key, value in zip(keys, values, strict=True):
        members.setdefault(key, []).append(value)
    return members


def conversation_keys(samples: Sequence[Sample]) -> list[tuple[Any, ...]]:
    """Key of each sample's conversation: its rollout, its seat, and its number among those of the seat."""
    return [(*key, *seat_of(sample)) for key, sample in zip(rollout_keys(samples), samples, strict=True)]


def seat_of(sample: Any) -> tuple[str, int]:
    """The seat of a sample and the number of its conversation; slime's has them in its metadata, as data may."""
    if getattr(sample, "seat", None) is not None:
        return sample.seat, sample.conversation
    metadata = sample.metadata or {}
    seat, number = metadata.get("seat"), metadata.get("conversation")
    return (seat, number if isinstance(number, int) else 0) if isinstance(seat, str) and seat else ("", 0)


def comparison_of(sample: Any, by: Comparison | None = None) -> str:
    """With which rewards that of a sample is compared: ``"seat"``, ``"episode"`` or ``"group"``.

    Args:
        sample: ours, or one of slime.
        by: replaces what the sample's metadata says.

    Raises:
        ConfigError: it is none of the three.
    """
    if by is None:
        kind = (sample.metadata or {}).get(COMPARISON, "seat") if seat_of(sample)[0] else "seat"
    else:
        kind = by if isinstance(by, str) else by.get(seat_of(sample)[0], "seat")
    if not isinstance(kind, str) or kind not in _COMPARED:
        name, got = (f"metadata[{COMPARISON!r}]", kind) if by is None else ("by", by)
        raise ConfigError.of(name, got, f"one of {tuple(_COMPARED)}" + (", or one for each seat" if by else ""))
    return kind


def comparison_keys(samples: Sequence[Sample], by: Comparison | None = None) -> list[tuple[Any, ...]]:
    """Key of the samples with which the reward of each sample is compared, whatever the order of the samples.

    Raises:
        ConfigError: ``by``, or the metadata of a sample, is not a :data:`Comparison`.
    """
    return [
        (sample.group_index, *_COMPARED[comparison_of(sample, by)](key, seat_of(sample)[0]))
        for key, sample in zip(rollout_keys(samples), samples, strict=True)
    ]


def comparison_name(sample: Sample) -> str:
    """The name of a sample's comparison, for a trainer that compares rows of one name.

    Its group, and its seat if it has one; ``GROUP/ROLLOUT/SEAT`` where the rewards of a rollout are compared.

    Raises:
        ConfigError: the rewards of a rollout are compared, and the sample has no ``rollout_id``.
    """
    kind, (seat, _) = comparison_of(sample), seat_of(sample)
    if kind == "episode" and sample.rollout_id is None:
        raise ConfigError.of(
            f"{sample!r}.rollout_id", None, "a number: its reward is compared with those of its rollout"
        )
    parts = {"seat": [seat], "episode": [f"{sample.rollout_id}", seat], "group": []}[kind]
    return "/".join([str(sample.group_index), *filter(None, parts)])


_COMPARED: Mapping[str, Callable[[tuple[str, int], str], tuple[Any, ...]]] = {
    "seat": lambda rollout, seat: (seat,),
    "episode": lambda rollout, seat: (rollout, seat),
    "group": lambda rollout, seat: (),
}
