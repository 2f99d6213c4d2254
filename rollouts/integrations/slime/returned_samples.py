"""slime's own samples as they are: what a function of slime's returned is checked, never rebuilt.

Invariant: the object that a generate function or a sample hook returned is the object that rewards and filters see and
that leaves in the batch, with whatever else stands on it. Only numbers that are missing are filled in, and the reward.
Our :class:`Sample` of it is a view for the manager; its ``trainer_record`` is a :class:`Kept`.

This module knows no server and no schedule.
"""

from __future__ import annotations

from typing import Any

import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.integrations.slime.convert import (
    check_shape,
    check_trainable,
    from_slime,
    leaves,
    reward_number,
    trained_versions,
    trains,
)
from rollouts.integrations.slime.records import records
from rollouts.training.types import Sample, Status

__all__ = ["Kept", "keep", "kept", "versions_of", "view"]

_LOST = (Status.FAILED, Status.ABORTED)


@attrs.define(eq=False)
class Kept:
    """slime's sample of one of ours."""

    sample: Any
    rollout: list[Any] | None = None
    """All samples of its rollout, where a generate function of slime's gave a list."""


def kept(sample: Sample) -> Any:
    """slime's sample of one of ours, or ``None`` where none was made yet."""
    record = sample.trainer_record
    return record.sample if isinstance(record, Kept) else None


def keep(
    made: Any, given: Any, request: Prompt, *, reward_key: str | None = None, evaluation: bool = False
) -> list[Sample]:
    """Our views of what a generate function of slime's gave for one rollout.

    Args:
        made: a sample of slime's, or a list of them.
        given: the sample that it was called with, for numbers that are missing on others.
        request: the prompt.
        reward_key: the part of a reward that is its number.
        evaluation: nothing of it will be trained.

    Raises:
        ConfigError: something else than slime's samples, one of them twice, several rollout ids, or a sample that slime
            cannot take.
    """
    rollout = list(leaves(made)) if isinstance(made, list) else None
    samples = [made] if rollout is None else rollout
    kind = records().sample
    index = request.index if given.index is None else given.index
    for sample in samples:
        if not isinstance(sample, kind):
            raise ConfigError.of("generate function", sample, "a Sample of slime's, or a list of them")
        sample.group_index = given.group_index if sample.group_index is None else sample.group_index
        sample.index = index if sample.index is None else sample.index
        sample.rollout_id = index if sample.rollout_id is None else sample.rollout_id
    if len({id(sample) for sample in samples}) < len(samples):
        raise ConfigError.of("generate function", samples, "each sample once: it would be trained twice")
    if len({sample.rollout_id for sample in samples}) > 1:
        numbers = [sample.rollout_id for sample in samples]
        raise ConfigError.of("generate function", numbers, "one rollout_id for all samples of a rollout")
    return [view(sample, request, rollout, reward_key=reward_key, evaluation=evaluation) for sample in samples]


def view(
    theirs: Any,
    request: Prompt | None,
    rollout: list[Any] | None = None,
    *,
    reward_key: str | None = None,
    evaluation: bool = False,
) -> Sample:
    """Our sample of one of slime's, which is kept as it is.

    Raises:
        ConfigError: slime could not train on it.
    """
    place = f"slime sample {theirs.index}"
    if not isinstance(theirs.status, records().sample.Status):
        raise ConfigError.of(f"{place}.status", theirs.status, "one of slime's Sample.Status")
    status = Status(theirs.status.value)
    if status in _LOST and theirs.remove_sample and (status is Status.FAILED or theirs.reward is not None):
        status = Status.COMPLETED  # its function has dealt with the failure: it is out of the loss, and not tried again
    if evaluation or status in _LOST:
        ours = _unread(theirs, request, [])
    else:
        check_shape(theirs, place)
        if trains(theirs):
            ours = from_slime(theirs, request)
            check_trainable(ours)
        else:
            ours = _unread(theirs, request, [int(token) for token in theirs.tokens])
    ours.status = status
    ours.reward = reward_number(theirs.reward, reward_key)
    ours.trainer_record = Kept(theirs, rollout)
    return ours


def _unread(theirs: Any, request: Prompt | None, tokens: list[int]) -> Sample:
    """A view without anything to train."""
    return Sample(
        prompt=theirs.prompt,
        response=theirs.response,
        tokens=tokens,
        metadata=dict(theirs.metadata or {}),
        label=theirs.label,
        group_index=None if request is None else request.group_index,
        index=None if request is None else request.index,
    )


def versions_of(sample: Sample, *, mask_earlier_versions: bool) -> list[str]:
    """The policy versions whose tokens a sample would train.

    A generate function of slime's notes them without saying which tokens are whose: all of them count.
    """
    theirs = kept(sample)
    if theirs is not None and not trains(theirs):
        return []
    if theirs is not None and not sample.versions:
        return [str(version) for version in theirs.weight_versions]
    return trained_versions([sample], mask_earlier_versions=mask_earlier_versions)
