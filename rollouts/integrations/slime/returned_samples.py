"""Samples that a function of slime returned: checked, never rebuilt.

Invariant: the object that a generate function or a sample hook returned is the object that rewards and filters get and
that the batch contains, with all its attributes. Only missing indices and the reward are set. Our :class:`Sample` of it
is a view for the manager; its ``trainer_record`` is a :class:`SlimeRecord`.

In this module ``record`` is slime's sample. It knows no server and no schedule.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.integrations.slime.convert import (
    Reading,
    check_shape,
    check_trainable,
    from_slime,
    leaves,
    status_of,
    trains,
)
from rollouts.integrations.slime.records import records
from rollouts.training.types import Sample, Status

__all__ = ["SlimeRecord", "hooked", "slime_sample_of", "versions_of", "view", "views_of_rollout"]


@attrs.define(eq=False)
class SlimeRecord:
    """The link from our sample to slime's."""

    sample: Any
    rollout: list[Any] | None = None
    """All samples of its rollout, if a generate function of slime returned a list."""
    owns_reward: bool = False
    """Whether a filter of slime has or had the reward: from then on ours is read from slime's sample."""
    unfiltered: Any = None
    """The reward before that, for a group that meets the filter again after a restart."""


def slime_sample_of(sample: Sample) -> Any:
    """slime's sample of ours, or ``None`` if it does not exist yet."""
    link = sample.trainer_record
    return link.sample if isinstance(link, SlimeRecord) else None


def views_of_rollout(returned: Any, argument: Any, request: Prompt, reading: Reading) -> list[Sample]:
    """Our views of the samples that a generate function of slime returned for one rollout; ``argument`` was its own.

    Raises:
        ConfigError: an object is not a sample of slime, a sample is listed twice, there are several rollout ids, or
            slime cannot process a sample.
    """
    rollout = list(leaves(returned)) if isinstance(returned, list) else None
    samples = [returned] if rollout is None else rollout
    kind = records().sample
    index = request.index if argument.index is None else argument.index
    for sample in samples:
        if not isinstance(sample, kind):
            raise ConfigError.of("generate function", sample, "a Sample of slime's, or a list of them")
        sample.group_index = argument.group_index if sample.group_index is None else sample.group_index
        sample.index = index if sample.index is None else sample.index
        sample.rollout_id = index if sample.rollout_id is None else sample.rollout_id
    if len({id(sample) for sample in samples}) < len(samples):
        raise ConfigError.of("generate function", samples, "each sample once: it would be trained twice")
    if len({sample.rollout_id for sample in samples}) > 1:
        numbers = [sample.rollout_id for sample in samples]
        raise ConfigError.of("generate function", numbers, "one rollout_id for all samples of a rollout")
    return [view(sample, request, reading, rollout) for sample in samples]


def view(record: Any, request: Prompt | None, reading: Reading, rollout: list[Any] | None = None) -> Sample:
    """Our view of slime's sample, which stays unchanged.

    A status FAILED does not exclude a sample: slime trains it, unless it has ``remove_sample``.

    Raises:
        ConfigError: slime could not train on it.
    """
    place = f"slime sample {record.index}"
    status = status_of(record, place)
    handled = status is Status.ABORTED and record.remove_sample and record.reward is not None
    if status is Status.FAILED or handled:
        status = Status.COMPLETED  # it is not retried
    if reading.evaluation or status is Status.ABORTED:
        ours = from_slime(record, request, trained=False, tokens=())
    else:
        check_shape(record, place, needs_logprobs=reading.needs_logprobs)
        ours = from_slime(record, request, trained=trains(record))
        if trains(record):
            check_trainable(ours, needs_logprobs=reading.needs_logprobs)
    ours.status, ours.reward = status, reading.number(record.reward)
    ours.trainer_record = SlimeRecord(record, rollout)
    return ours


async def hooked(
    sample: Sample, request: Prompt, branch: int, reading: Reading, call: Callable[[Any], Awaitable[Any]]
) -> Sample:
    """Our sample after ``call``, which gives slime's to the sample hooks; another one if they changed its columns.

    Raises:
        ConfigError: slime could not train on it.
    """
    link, before = sample.trainer_record, _columns(sample.trainer_record.sample)
    record = await call(link.sample)
    if link.rollout is not None:
        link.rollout[branch] = record
    changed = view(record, request, reading, link.rollout)
    if before != _columns(record):
        return changed
    sample.trainer_record = changed.trainer_record
    sample.metadata = changed.metadata if record.metadata is None else record.metadata
    sample.response, sample.label, sample.status = record.response, changed.label, changed.status
    sample.reward = sample.reward if record.reward is None else changed.reward
    return sample


def _columns(record: Any) -> tuple[list[Any], ...]:
    """A copy of the columns of slime's sample."""
    columns = (record.tokens, record.loss_mask, record.rollout_log_probs)
    return tuple([] if column is None else list(column) for column in columns)


def versions_of(sample: Sample, *, mask_earlier_versions: bool) -> list[str]:
    """The policy versions whose tokens a sample would train.

    A sample of slime's function lists its versions without token positions, so all of them count.
    """
    record = slime_sample_of(sample)
    if record is not None and not trains(record):
        return []
    if record is not None and not sample.versions:
        return [str(version) for version in record.weight_versions]
    return [span.version for span in sample.versions[-1 if mask_earlier_versions else 0 :]]
