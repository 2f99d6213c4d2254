"""Conversion between our samples and slime's, and the checks of a batch for slime.

Invariant: a sample of :func:`to_slime` trains exactly the tokens that the policy sampled: ``loss_mask`` and
``rollout_log_probs`` are the last ``response_length`` entries of ours, and prompt and response have at least one token.
A sample that slime cannot process raises an error with its name, and is never repaired. Every batch passes
``check_training_batch``; samples that train no token (:func:`trains`) must only have slime's shapes.

This module does not know how samples are generated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from rollouts.base.validators import finite
from rollouts.dtypes import Message
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.integrations.slime.extras import Replay, add_extras
from rollouts.integrations.slime.records import family, records
from rollouts.integrations.slime.settings import NEEDS_ADVANTAGES
from rollouts.rewards.teacher_top import SCORED_BY, check_without_top, reverse_kl, top_of
from rollouts.training.comparisons import COMPARISON, comparison_of
from rollouts.training.rows import check_fields, check_has_ids, check_trained, reward_of
from rollouts.training.sample_validator import copied
from rollouts.training.types import Sample, Status

__all__ = [
    "Reading",
    "add_teacher",
    "check_shape",
    "check_trainable",
    "check_training_batch",
    "from_slime",
    "leaves",
    "set_advantages",
    "status_of",
    "to_slime",
    "trains",
]

_NO_REPLAY = Replay()


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
        """The trained number of a reward; ``None`` if it is not finite, 0.0 if a function of the launch converts it."""
        has_parts = isinstance(reward, dict) and self.reward_key is not None
        number = finite(reward.get(self.reward_key) if has_parts else reward)
        return 0.0 if number is None and self.any_reward and reward is not None else number


def to_slime(
    sample: Sample,
    *,
    template: Any = None,
    mask_earlier_versions: bool = False,
    session: str = "",
    scored: bool = True,
    replay: Replay = _NO_REPLAY,
    checked: bool = False,
    kl_weights: Any = "student_p",
) -> Any:
    """Convert a sample to slime's; the conversation becomes its attribute ``messages``.

    Args:
        sample: finished and scored; its columns are as wide as its tokens.
        template: slime's sample of this rollout; its other fields are copied.
        mask_earlier_versions: train only the tokens of the sample's last policy version.
        session: the routing key of its requests.
        scored: whether it is final: it has a reward and no advantages, which :func:`set_advantages` would set.
        replay: columns of its completions that slime's sample needs.
        checked: whether :func:`check_trainable` has taken it as it is.
        kl_weights: of a teacher's most probable ids (:func:`~rollouts.rewards.teacher_top.reverse_kl`).

    Raises:
        ConfigError: no sampled token, no prompt token, no logprobs, a reward that is not a finite number, a column to
            replay that does not cover the sample, or a field that slime lacks: advantages, a ``loss_multiplier`` other
            than 0 and 1, a teacher's most probable ids (miles takes them with the student's logprobs).
    """
    if not checked:
        check_trainable(sample)
    lacking = (("advantages", scored), ("loss_multiplier", sample.loss_multiplier != 0))
    check_fields(sample, "slime", *(name for name, lacks in lacking if lacks))
    if scored:
        reward_of(sample)
    mask, logprobs = sample.mask_column, sample.logprob_column
    assert logprobs is not None  # just checked
    logprobs = np.where(mask, logprobs, 0.0)
    if mask_earlier_versions:
        mask = mask.copy()
        for span in sample.versions:
            if span.version != sample.versions[-1].version:
                mask[span.start : span.stop] = False
    first, length = len(sample) - sample.response_length, len(sample)
    if replay.experts is not None and sample.completions:
        length = int(sample.completions[-1].stop)  # no request contained later tokens: their routing is not known
    kind = records().sample
    record = kind() if template is None else copy.copy(template)
    record.metadata = {**(record.metadata or {}), **sample.metadata}
    if sample.seat:
        record.metadata |= {"seat": sample.seat, "conversation": sample.conversation, COMPARISON: comparison_of(sample)}
    record.prompt = record.prompt if template is not None else _plain_prompt(sample.prompt)
    record.label = sample.label if template is None else record.label
    record.group_index = sample.group_index if record.group_index is None else record.group_index
    record.index = sample.index if record.index is None else record.index
    record.rollout_id = record.index if record.rollout_id is None else record.rollout_id
    record.tokens = sample.token_column[:length].tolist()
    record.response = sample.response
    record.response_length = length - first
    record.loss_mask = mask[first:length].astype(int).tolist()
    record.rollout_log_probs = logprobs[first:length].tolist()
    record.reward = sample.reward
    record.status = kind.Status(sample.status.value)
    completions, spans = sample.completions, sample.versions
    # One entry for each completion and version: a resumed completion has several. slime appends one for each request
    # (slime 0.3.1, utils/types.py: Sample._apply_meta_info).
    record.weight_versions = [
        span.version for call in completions for span in spans if span.start < call.stop and span.stop > call.start
    ] or sample.weight_versions
    record.prefix_cache_info = kind.PrefixCacheInfo(
        cached_tokens=sum(call.cached_tokens for call in completions),
        total_prompt_tokens=sum(call.start for call in completions),
    )
    record.non_generation_time = float(sample.metrics.get("environment_seconds", 0.0))
    record.messages = sample.read_record("messages")
    setattr(record, family().session, getattr(record, family().session) or session or None)
    if sample.loss_multiplier == 0:
        record.remove_sample = True
    if template is not None and template.response_length and template.teacher_log_probs is not None:
        record.teacher_log_probs = None  # of the tokens of an earlier rollout: the group is played again
        if family().takes_divergences:
            record.opd_reverse_kl = None
    add_teacher(record, sample, kl_weights)
    if sample.images:
        import torch

        record.multimodal_inputs = {**(record.multimodal_inputs or {}), **(sample.multimodal_inputs or {})}
        inputs = sample.multimodal_train_inputs or {}
        record.multimodal_train_inputs = {name: torch.from_numpy(array) for name, array in inputs.items()}
    add_extras(record, sample, replay)
    return record


def add_teacher(record: Any, sample: Sample, kl_weights: Any = "student_p") -> None:
    """Set the columns of slime's sample that a teacher's scores make; raises as :func:`to_slime`."""
    teacher = sample.teacher_column
    if teacher is None:
        return
    import torch

    if not family().takes_divergences:
        check_without_top(sample, "slime")
    there = slice(len(record.tokens) - record.response_length, len(record.tokens))
    record.teacher_log_probs = torch.from_numpy(teacher[there].copy())
    if (top := top_of(sample)) is not None:
        divergences = np.zeros(len(sample), np.float32)
        divergences[sample.mask_column] = reverse_kl(top, kl_weights)
        record.opd_reverse_kl = torch.from_numpy(divergences[there])
        record.metadata = {**record.metadata, SCORED_BY: {"url": sample.metadata[SCORED_BY]["url"]}}


def set_advantages(record: Any, sample: Sample) -> None:
    """Put the advantages of a sample into the column that carries them to the trainer.

    Raises:
        ConfigError: it has none, or logprobs of a teacher.
    """
    column, before = sample.advantage_column, len(record.tokens) - record.response_length
    if column is None or record.teacher_log_probs is not None:
        got = None if column is None else "a column, and teacher_log_probs"
        raise ConfigError.of(f"{sample!r}.advantages", got, f"{NEEDS_ADVANTAGES} (args.custom_advantage_function_path)")
    record.teacher_log_probs = column[before : len(record.tokens)].tolist()


def check_trainable(sample: Sample, *, needs_logprobs: bool = True) -> None:
    """Check that a rollout can be trained on, before it is scored.

    Raises:
        ConfigError: no sampled token, no prompt token, or logprobs that are missing and needed, or not finite.
    """
    sample.check()
    check_has_ids(sample)
    check_trained(sample, needs_logprobs=needs_logprobs)


def from_slime(sample: Any, request: Any = None, *, trained: bool = True, tokens: Any = None) -> Sample:
    """Convert slime's sample to ours: its response columns are extended over the prompt.

    Args:
        request: the prompt of its rollout, with ``group_index`` and ``index``: a function may change the sample's.
        trained: whether a token of it is trained; else the result has no columns but ``tokens``.
        tokens: if they are not the sample's.

    Raises:
        ConfigError: a column is not as long as the tokens.
    """
    tokens = [int(token) for token in (sample.tokens if tokens is None else tokens)]
    fields: dict[str, Any] = {
        "prompt": sample.prompt if request is None else request.prompt,
        "response": sample.response,
        "tokens": tokens,
        "metadata": dict(sample.metadata or {}),
        "label": copied(sample.label),  # slime's functions may edit theirs in place
        "status": getattr(sample.status, "value", sample.status),
        "group_index": None if request is None else request.group_index,
        "index": None if request is None else request.index,
    }
    if not trained:
        return Sample(**fields)
    width, logprobs = int(sample.response_length), sample.rollout_log_probs
    mask = [1] * width if sample.loss_mask is None else list(sample.loss_mask)
    before = len(tokens) - width
    try:
        return Sample(
            **fields,
            loss_mask=[0] * before + mask,
            rollout_log_probs=None if logprobs is None else [0.0] * before + list(logprobs),
            reward=float(sample.reward) if isinstance(sample.reward, int | float) else None,
            messages=list(getattr(sample, "messages", ())),
            metrics={"environment_seconds": float(sample.non_generation_time)},
        )
    except ConfigError as error:
        raise ConfigError(f"slime sample {sample.index}: {error}") from None


def trains(sample: Any) -> bool:
    """Whether slime would train a token of this sample.

    (slime 0.3.1, ray/rollout.py: RolloutManager._convert_samples_to_train_data)
    """
    if sample.remove_sample:
        return False
    return sample.response_length > 0 if sample.loss_mask is None else any(sample.loss_mask)


def leaves(groups: Any) -> Iterator[Any]:
    """Flatten nested lists of samples, in order."""
    if isinstance(groups, list):
        for entry in groups:
            yield from leaves(entry)
    else:
        yield groups


def check_training_batch(groups: Sequence[Any], shape: tuple[int, int], reading: Reading, replay: Replay) -> None:
    """Check the assumptions about a batch of slime's samples that slime itself does not check.

    ``shape`` is the number of groups, and that of the rollouts in each.

    Raises:
        ConfigError: a wrong number of groups, a group of another size, groups of different nesting, a rollout id of two
            rollouts, or a sample that cannot be trained.
    """
    groups_wanted, rollouts_in_group = shape
    if len(groups) != groups_wanted:
        raise ConfigError.of("batch", f"{len(groups)} groups", f"{groups_wanted} groups")
    seen: set[Any] = set()
    fans_out = isinstance(groups[0][0], list)
    for number, group in enumerate(groups):
        if len(group) != rollouts_in_group:
            raise ConfigError.of(f"groups[{number}]", f"{len(group)} rollouts", f"{rollouts_in_group} rollouts")
        for rollout in group:
            if isinstance(rollout, list) is not fans_out:
                raise ConfigError.of(f"groups[{number}]", rollout, "one shape of groups throughout the batch")
            samples = rollout if fans_out else [rollout]
            ids = {sample.rollout_id for sample in samples}
            if len(ids) != 1 or None in ids or not seen.isdisjoint(ids):
                raise ConfigError.of(f"groups[{number}].rollout_id", ids, "one number that no other rollout has")
            seen |= ids
            for sample in samples:
                place = f"groups[{number}], sample {sample.index}"
                check_shape(sample, place, needs_logprobs=reading.needs_logprobs)
                _check_replayed(sample, place, replay)
                if status_of(sample, place) is Status.ABORTED and trains(sample):
                    raise ConfigError.of(f"{place}.status", sample.status, "another than ABORTED")
                if reading.number(sample.reward) is None:
                    raise ConfigError.of(f"{place}.reward", sample.reward, "a finite number, under --reward-key if set")


def check_shape(sample: Any, place: str, *, needs_logprobs: bool = True) -> None:
    """Check the shapes that slime's tensors need of every sample, trained or not.

    Raises:
        ConfigError: a column is not as long as the response, or the prompt is empty.
    """
    width = sample.response_length
    lengths = {"loss_mask": width if sample.loss_mask is None else len(sample.loss_mask)}
    if sample.rollout_log_probs is not None or needs_logprobs:
        lengths["rollout_log_probs"] = 0 if sample.rollout_log_probs is None else len(sample.rollout_log_probs)
    if set(lengths.values()) != {width} or not 1 <= width < len(sample.tokens):
        failed = getattr(sample.status, "value", "") == "failed"
        remedy = "; a failed one without tokens needs one of loss_mask 0, and remove_sample" if failed else ""
        expected = f"columns of the response's length, {width}, at least one token, and a prompt{remedy}"
        raise ConfigError.of(place, {**lengths, "tokens": len(sample.tokens)}, expected)


def status_of(sample: Any, place: str) -> Status:
    """The status of slime's sample as ours.

    Raises:
        ConfigError: it is not slime's.
    """
    if not isinstance(sample.status, records().sample.Status):
        raise ConfigError.of(f"{place}.status", sample.status, "one of slime's Sample.Status")
    return Status(sample.status.value)


def _check_replayed(sample: Any, place: str, replay: Replay) -> None:
    for name, flag in replay.fields.items():
        column = getattr(sample, name)
        length = len(sample.tokens) - 1 if name == "rollout_routed_experts" else sample.response_length + 1
        if column is None or len(column) != length:
            got = None if column is None else f"{len(column)} entries"
            raise ConfigError.of(f"{place}.{name}", got, f"{length} entries, since args.{flag} is set")


def _plain_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt
    return [entry.to_chat() if isinstance(entry, Message) else entry for entry in prompt]
