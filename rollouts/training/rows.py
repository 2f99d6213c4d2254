"""Views of samples as trainers take them: one row a branch, which ends in a sampled token.

Invariant: no token is added, changed or moved; what no reply answered is cut from the end, because a trainer that puts
the reward on the last token of a row would lose it there. A sample that a trainer cannot take is refused by name.

Pure numpy. This module knows no trainer; the adapters of ``rollouts.integrations`` are made of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from rollouts.base.validators import finite, is_int
from rollouts.dtypes import LogprobColumn, TokenColumn
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError
from rollouts.training.comparisons import by_conversation
from rollouts.training.types import Sample, Status, by_rollout

__all__ = [
    "CHAT_API",
    "NO_IDS",
    "Columns",
    "Row",
    "by_conversation",
    "by_rollout",
    "check_fields",
    "check_has_ids",
    "check_one_branch",
    "check_temperature",
    "check_trained",
    "image_column",
    "int_version",
    "reward_of",
    "reward_of_branches",
    "row_columns",
    "row_images",
    "segments",
    "split",
    "split_advantages",
    "trimmed",
    "turn_column",
    "version_column",
]


CHAT_API = "chat_api"
"""Metadata key of a sample of a chat API: the requested model, and the models that answered."""
NO_IDS = "a batch for GRPO needs token ids in and out with logprobs; this API has none"


class Row(NamedTuple):
    """Prompt and response of a row; n = p + r tokens, of which the first response token and the last are sampled."""

    prompt: TokenColumn
    """Ids before the first sampled one, int32 ``[p]``, p >= 1."""
    response: TokenColumn
    """Ids from there on, int32 ``[r]``, r >= 1."""
    mask: npt.NDArray[np.bool_]
    """Which of the response were sampled, ``[r]``."""
    logprobs: LogprobColumn
    """Their logprobs, 0 on context, float32 ``[r]``."""


class Columns(NamedTuple):
    """The columns of a row, as wide as its tokens. The arrays are read-only views."""

    tokens: TokenColumn
    """int32 ``[n]``."""
    mask: npt.NDArray[np.bool_]
    """Which of them were sampled, ``[n]``."""
    logprobs: LogprobColumn
    """Their logprobs, 0 on context, float32 ``[n]``."""


def row_columns(sample: Sample, trainer: str, *lacking: str) -> Columns:
    """The columns of ``trimmed(sample)``, of a sample that a trainer can take.

    Args:
        sample: any sample.
        trainer: as for :func:`check_fields`.
        *lacking: as for :func:`check_fields`.

    Raises:
        ConfigError: as :func:`split` and :func:`check_fields`.
    """
    check_fields(sample, trainer, *lacking)
    return _checked(sample)[0]


def split(sample: Sample) -> Row:
    """Split a sample at its first sampled token, without its unanswered end. The arrays are read-only views.

    Raises:
        ConfigError: the rollout failed or was aborted, or the sample has no sampled token, no prompt token, or no
            logprobs.
    """
    (tokens, mask, logprobs), start = _checked(sample)
    return Row(tokens[:start], tokens[start:], mask[start:], logprobs[start:])


def split_advantages(sample: Sample) -> npt.NDArray[np.float32]:
    """``advantages`` of the response of :func:`split`, 0 on context, float32 ``[r]``.

    Raises:
        ConfigError: it has none, or no sampled token.
    """
    start, stop = _trained_range(sample)
    column = sample.advantage_column
    if column is None:
        raise ConfigError.of(f"{sample!r}.advantages", None, "a column, of credit.assign_advantages, in every sample")
    return np.where(sample.mask_column[start:stop], column[start:stop], np.float32(0))


def _checked(sample: Sample) -> tuple[Columns, int]:
    """The columns of a row, and the position of its first sampled token."""
    if sample.status in (Status.FAILED, Status.ABORTED):
        raise ConfigError.of(f"{sample!r}.status", sample.status.value, "a rollout that ended; leave this one out")
    tokens, mask, logprobs = sample.columns
    start, stop = check_trained(sample)
    assert logprobs is not None  # just checked
    return Columns(tokens[:stop], mask[:stop], logprobs[:stop]), start


def check_trained(sample: Sample, *, needs_logprobs: bool = True) -> tuple[int, int]:
    """Check that a trainer can train on a sample; return the position of its first sampled token, and after the last.

    Raises:
        ConfigError: no sampled token, no prompt token, or logprobs that are missing and needed, or not finite.
    """
    start, stop = _trained_range(sample)
    if not start:
        raise ConfigError.of(f"{sample!r}.tokens", "a sampled token first", "at least one prompt token before it")
    logprobs = sample.logprob_column
    if (logprobs is None and needs_logprobs) or (logprobs is not None and not np.isfinite(logprobs).all()):
        got = None if logprobs is None else "not all finite"
        raise ConfigError.of(f"{sample!r}.rollout_log_probs", got, "a finite logprob for each sampled token")
    return start, stop


def trimmed(sample: Sample) -> Sample:
    """The sample, cut after its last sampled token: itself, or a copy whose columns are views.

    Texts, messages and completions stay those of the whole rollout.

    Raises:
        ConfigError: it has no sampled token.
    """
    _, stop = _trained_range(sample)
    if stop == len(sample):
        return sample
    tokens, mask, logprobs = sample.columns
    advantages, teacher = sample.advantage_column, sample.teacher_column
    cut = attrs.evolve(
        sample,
        tokens=tokens[:stop],
        loss_mask=mask[:stop],
        rollout_log_probs=None if logprobs is None else logprobs[:stop],
        advantages=None if advantages is None else advantages[:stop],
        teacher_log_probs=None if teacher is None else teacher[:stop],
        images=[span for span in sample.images if span.stop <= stop],
    )
    cut.image_inputs = sample.image_inputs
    return cut


def row_images(sample: Sample, trainer: str = "", *names: str) -> dict[str, npt.NDArray[Any]]:
    """The model's inputs for the images of ``trimmed(sample)``, such as ``pixel_values``.

    Args:
        sample: any sample.
        trainer: the name of a trainer that passes only the arrays of ``names`` to the model.
        *names: their names; by default all.

    Returns:
        For each name the arrays of the images in the order of their ids, joined along dimension 0; ``{}`` without
        images. The images themselves are ``trimmed(sample).images``.

    Raises:
        ConfigError: the row ends inside an image, or has no sampled token, or the sample has images and no
            ``image_inputs``, or its processor makes an array of another name.
    """
    row = trimmed(sample)
    for span in sample.images:
        if span.start < len(row) < span.stop:
            expected = f"ids of an image before or after the end of the row, {len(row)}"
            raise ConfigError.of(f"{sample!r}.images", (span.start, span.stop), expected)
    arrays = row.multimodal_train_inputs or {}
    if names and not arrays.keys() <= set(names):
        expected = f"{' and '.join(names)}: {trainer} passes no others to the model"
        raise ConfigError.of(f"{sample!r}.multimodal_train_inputs", sorted(arrays), expected)
    return arrays


def image_column(sample: Sample) -> npt.NDArray[np.bool_]:
    """Which ids of ``trimmed(sample)`` stand for an image, ``[n]``.

    Raises:
        ConfigError: it has no sampled token.
    """
    row = trimmed(sample)
    column = np.zeros(len(row), np.bool_)
    for span in row.images:
        column[span.start : span.stop] = True
    return column


def segments(sample: Sample) -> list[tuple[int, int, bool]]:
    """The runs of the mask as ``(start, stop, sampled)``, in order; together they cover ``trimmed(sample)``.

    Raises:
        ConfigError: it has no sampled token.
    """
    _, stop = _trained_range(sample)
    mask = sample.mask_column[:stop]
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), stop]
    return [(start, end, bool(mask[start])) for start, end in itertools.pairwise(edges)]


def turn_column(sample: Sample) -> npt.NDArray[np.int32]:
    """The number of the turn that sampled each token of ``trimmed(sample)``, -1 on context, int32 ``[n]``.

    A completion that continues a turn has its number, the first has 0. Without completions each run of the mask counts.

    Raises:
        ConfigError: it has no sampled token.
    """
    runs = segments(sample)
    column = np.full(runs[-1][1], -1, np.int32)
    turn = -1
    for record in sample.completions:
        turn = max(turn + (not record.continues), 0)
        column[record.start : record.stop] = turn
    if not sample.completions:
        for turn, (start, stop, _) in enumerate(run for run in runs if run[2]):
            column[start:stop] = turn
    return column


def version_column(sample: Sample, version: int | None = None) -> npt.NDArray[np.int64]:
    """The policy version of each token of ``trimmed(sample)`` as a number, -1 on context, int64 ``[n]``.

    Args:
        sample: its versions are decimal numbers, as a trainer names the weights that it sends.
        version: the version of all sampled tokens, instead of theirs.

    Raises:
        ConfigError: it has no versions, or a name that is not a decimal number, and ``version`` is ``None``; or it
            has no sampled token.
    """
    _, stop = _trained_range(sample)
    column = np.full(stop, -1, np.int64)
    if version is not None:
        if not is_int(version, 0):
            raise ConfigError.of("version", version, "an integer >= 0")
        column[sample.mask_column[:stop]] = version
        return column
    spans = sample.versions
    names = list(dict.fromkeys(span.version for span in spans))
    if not names or not all(name.isascii() and name.isdecimal() for name in names):
        expected = "decimal numbers, or version= for all tokens (--version N of rollouts export)"
        raise ConfigError.of(f"{sample!r}.versions", names, expected)
    for span in spans:
        column[span.start : span.stop] = int(span.version)
    return column


def int_version(sample: Sample, version: int | None = None) -> int:
    """The oldest policy version of the sample's sampled tokens, which limits its staleness.

    Raises:
        ConfigError: as :func:`version_column`.
    """
    column = version_column(sample, version)
    return int(column[column >= 0].min())


def check_one_branch(samples: Sequence[Sample], trainer: str) -> None:
    """Check that no conversation has several branches, for a trainer that takes one row for each.

    Raises:
        ConfigError: one forks.
    """
    for branches in by_conversation(samples):
        if len(branches) > 1:
            expected = f"one row for each rollout: {trainer} takes no forks"
            raise ConfigError.of(f"{branches[0]!r}", f"{len(branches)} branches", expected)


def reward_of(sample: Sample) -> float:
    """The reward.

    Raises:
        ConfigError: there is none, or it is not finite.
    """
    reward = finite(sample.reward)
    if reward is None:
        raise ConfigError.of(f"{sample!r}.reward", sample.reward, "a finite number")
    return reward


def reward_of_branches(branches: Sequence[Sample]) -> float:
    """The reward that all branches of a conversation have, for a trainer that takes one for a rollout.

    Raises:
        ConfigError: a sample has none, or one that is not finite; or the rewards differ.
    """
    rewards = [reward_of(branch) for branch in branches]
    if len(set(rewards)) > 1:
        expected = "one reward: samples of one rollout with unlike rewards, without a seat, have no reward in common"
        raise ConfigError.of(f"{branches[0]!r}: rewards of its rollout", rewards, expected)
    return rewards[0]


def check_temperature(sample: Sample, trainer: str, temperature: float | None) -> None:
    """Check that a sample was sampled at the temperature by which a trainer divides its logits.

    The stored logprobs are of the distribution at the sampler's temperature. At another one, the trainer's logprobs of
    the same tokens, and its gradient, are of another distribution. A completion whose record has no temperature is not
    compared.

    Args:
        sample: any sample.
        trainer: its name, for the message.
        temperature: that of the trainer; ``None`` if it is not known: then 1, the default of every trainer.

    Raises:
        ConfigError: a completion was sampled at another temperature; or as :func:`check_has_ids`.
    """
    check_has_ids(sample)
    theirs = 1.0 if temperature is None else temperature
    for number, one in enumerate(sample.completions):
        if one.temperature is not None and one.temperature != theirs:
            expected = f"{theirs:g}, by which {trainer} divides logits"
            if temperature is None:
                expected += " by default; temperature= (--temperature of rollouts export) names another"
            raise ConfigError.of(f"{sample!r}.completions[{number}].temperature", one.temperature, expected)


def check_fields(sample: Sample, trainer: str, *lacking: str) -> None:
    """Check that the sample sets none of the fields that a trainer has no place for.

    Args:
        sample: any sample.
        trainer: its name, for the message.
        lacking: ``loss_multiplier``, ``advantages``, ``teacher_log_probs``, ``images``.

    Raises:
        ConfigError: one of them is set, so its effect would be lost; or as :func:`check_has_ids`.
    """
    check_has_ids(sample)
    for name in lacking:
        value, unset = getattr(sample, name), {"loss_multiplier": 1.0, "images": ()}.get(name)
        if value != unset:
            got = value if name == "loss_multiplier" else f"{len(value)} {'images' if name == 'images' else 'numbers'}"
            raise ConfigError.of(f"{sample!r}.{name}", got, f"{unset}: {trainer} has no field for it")


def check_has_ids(sample: Sample) -> None:
    """Check that a sample is not the text of a chat API.

    Raises:
        ConfigError: it is, so that no trainer can take it.
    """
    if not len(sample) and CHAT_API in sample.metadata:
        source = sample.metadata[CHAT_API]
        got = f"no ids, but text of {source.get('model')} at {source.get('url')}"
        raise ConfigError.of(f"{sample!r}.tokens", got, f"the ids of a server of tokens: {NO_IDS}")


def _trained_range(sample: Sample) -> tuple[int, int]:
    """Positions of the first sampled token, and after the last."""
    mask = sample.mask_column
    if not mask.any():
        raise ConfigError.of(f"{sample!r}.loss_mask", "no 1", "at least one sampled token")
    return int(mask.argmax()), len(mask) - int(mask[::-1].argmax())
