"""Samples that a function of slime returned: checked, never rebuilt.

Invariant: the object that a generate function or a sample hook returned is the object that rewards and filters get and
that the batch contains, with all its attributes. Only missing indices and the reward are set. Our :class:`Sample` of it
is a view for the manager; its ``trainer_record`` is a :class:`SlimeRecord`.

In this module ``record`` is slime's sample. It knows no server and no schedule.
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
    prompt_of,
    reward_number,
    trained_versions,
    trains,
)
from rollouts.integrations.slime.records import records
from rollouts.training.types import Sample, Status

__all__ = ["Reading", "SlimeRecord", "slime_sample_of", "versions_of", "view", "views_of_rollout"]


@attrs.frozen(kw_only=True)
class Reading:
    """The expectations of a launch for the samples of its functions."""

    reward_key: str | None = None
    """The entry of a dict reward that is trained on."""
    any_reward: bool = False
    """Whether a reward needs no number, because a function of the launch converts it later."""
    needs_logprobs: bool = True
    """Whether the trainer uses the logprobs of the rollouts; without them it computes its own."""
    evaluation: bool = False
    """Whether the samples belong to an evaluation, which trains nothing."""

    def number(self, reward: Any) -> float | None:
        """The trained number of a reward; see :func:`~rollouts.integrations.slime.convert.reward_number`."""
        return reward_number(reward, self.reward_key, any_reward=self.any_reward)


@attrs.define(eq=False)
class SlimeRecord:
    """The link from our sample to slime's."""

    sample: Any
    rollout: list[Any] | None = None
    """All samples of its rollout, if a generate function of slime returned a list."""
    owns_reward: bool = False
    """Whether a filter of slime has had the reward: from then on ours is read from slime's sample."""
    unfiltered: Any = None
    """The reward before that, for a group that meets the filter again after a restart."""


def slime_sample_of(sample: Sample) -> Any:
    """slime's sample of ours, or ``None`` if it does not exist yet."""
    link = sample.trainer_record
    return link.sample if isinstance(link, SlimeRecord) else None


def views_of_rollout(returned: Any, argument: Any, request: Prompt, reading: Reading) -> list[Sample]:
    """Our views of the samples that a generate function of slime returned for one rollout.

    Args:
        returned: slime's sample, or a list of them.
        argument: the argument of the generate function; its indices fill missing ones.
        request: the prompt.
        reading: what the launch expects.

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
    if not isinstance(record.status, records().sample.Status):
        raise ConfigError.of(f"{place}.status", record.status, "one of slime's Sample.Status")
    status = Status(record.status.value)
    handled = status is Status.ABORTED and record.remove_sample and record.reward is not None
    if status is Status.FAILED or handled:
        status = Status.COMPLETED  # it is not retried
    if reading.evaluation or status is Status.ABORTED:
        ours = _untrained(record, request, [])
    else:
        check_shape(record, place, needs_logprobs=reading.needs_logprobs)
        if trains(record):
            ours = from_slime(record, request)
            check_trainable(ours, needs_logprobs=reading.needs_logprobs)
        else:
            ours = _untrained(record, request, [int(token) for token in record.tokens])
    ours.status = status
    ours.reward = reading.number(record.reward)
    ours.trainer_record = SlimeRecord(record, rollout)
    return ours


def _untrained(record: Any, request: Prompt | None, tokens: list[int]) -> Sample:
    """A view without trained tokens."""
    return Sample(
        prompt=prompt_of(record, request),
        response=record.response,
        tokens=tokens,
        metadata=dict(record.metadata or {}),
        label=record.label,
        group_index=None if request is None else request.group_index,
        index=None if request is None else request.index,
    )


def versions_of(sample: Sample, *, mask_earlier_versions: bool) -> list[str]:
    """The policy versions whose tokens a sample would train.

    A sample of slime's function lists its versions without token positions, so all of them count.
    """
    record = slime_sample_of(sample)
    if record is not None and not trains(record):
        return []
    if record is not None and not sample.versions:
        return [str(version) for version in record.weight_versions]
    return trained_versions([sample], mask_earlier_versions=mask_earlier_versions)
