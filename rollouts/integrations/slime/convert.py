"""Conversion between our samples and slime's, and the checks of a batch for slime.

Invariant: a sample of :func:`to_slime` trains exactly the tokens that the policy sampled: ``loss_mask`` and
``rollout_log_probs`` are the last ``response_length`` entries of ours, and prompt and response have at least one token.
A sample that slime cannot process raises an error with its name, and is never repaired. Every batch passes
``check_training_batch``; samples that train no token (:func:`trains`) must only have slime's shapes.

This module does not know how samples are generated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rollouts.dtypes import Message
from rollouts.errors import ConfigError
from rollouts.integrations.slime.extras import Replay, add_extras, length_with_routing
from rollouts.integrations.slime.records import family, records
from rollouts.training.rows import check_fields, check_has_ids
from rollouts.training.types import Sample, Status
from rollouts.trajectory import CompletionRecord

__all__ = [
    "check_shape",
    "check_trainable",
    "check_training_batch",
    "from_slime",
    "leaves",
    "prompt_of",
    "reward_number",
    "to_slime",
    "trained_versions",
    "trains",
]

_NO_REPLAY = Replay()
_TRAINABLE = (Status.PENDING, Status.COMPLETED, Status.TRUNCATED, Status.FAILED)
"""slime asks for no status: it also trains a sample whose generate function set none, or set FAILED.

(slime 0.3.1, ray/rollout.py: RolloutManager._convert_samples_to_train_data)
"""


def to_slime(
    sample: Sample,
    *,
    template: Any = None,
    mask_earlier_versions: bool = False,
    session: str = "",
    reward_key: str | None = None,
    scored: bool = True,
    replay: Replay = _NO_REPLAY,
    evaluation: bool = False,
    checked: bool = False,
) -> Any:
    """Convert a sample to slime's; the conversation becomes its attribute ``messages``.

    Args:
        sample: finished and scored; its columns are as wide as its tokens.
        template: slime's sample of this rollout; its other fields are copied.
        mask_earlier_versions: train only the tokens of the sample's last policy version.
        session: the routing key of its requests.
        reward_key: slime's ``--reward-key``; if set, the reward becomes a dict with this key.
        scored: whether a reward is required.
        replay: columns of its completions that slime's sample needs.
        evaluation: whether it belongs to an evaluation.
        checked: whether :func:`check_trainable` has taken it as it is.

    Raises:
        ConfigError: no sampled token, no prompt token, no logprobs, a reward that is not a finite number, a column to
            replay that does not cover the sample, or a field that slime lacks: advantages, a ``loss_multiplier`` other
            than 0 and 1.
    """
    if not checked:
        check_trainable(sample)
    lacking = ("advantages", *(() if sample.loss_multiplier == 0 else ("loss_multiplier",)))
    check_fields(sample, "slime", *lacking)
    if scored and (sample.reward is None or not math.isfinite(sample.reward)):
        raise ConfigError.of(f"{sample!r}.reward", sample.reward, "a finite number")
    mask, logprobs = sample.mask_column, sample.logprob_column
    assert logprobs is not None  # just checked
    logprobs = np.where(mask, logprobs, 0.0)
    if mask_earlier_versions:
        mask = mask & _of_last_version(sample)
    first, length = len(sample) - sample.response_length, length_with_routing(sample, replay)
    kind = records().sample
    record = kind() if template is None else copy.copy(template)
    record.metadata = {**(record.metadata or {}), **sample.metadata}
    if sample.seat:
        record.metadata |= {"seat": sample.seat, "conversation": sample.conversation}
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
    has_parts = reward_key is not None and sample.reward is not None
    record.reward = {reward_key: sample.reward} if has_parts else sample.reward
    record.status = kind.Status(sample.status.value)
    completions = sample.completions
    record.weight_versions = _versions_of_completions(sample, completions)
    record.prefix_cache_info = kind.PrefixCacheInfo(
        cached_tokens=sum(call.cached_tokens for call in completions),
        total_prompt_tokens=sum(call.start for call in completions),
    )
    record.non_generation_time = float(sample.metrics.get("environment_seconds", 0.0))
    record.messages = sample.read_record("messages")
    setattr(record, family().session, getattr(record, family().session) or session or None)
    if sample.loss_multiplier == 0:
        record.remove_sample = True
    teacher = sample.teacher_column
    if teacher is not None:
        import torch

        record.teacher_log_probs = torch.from_numpy(teacher[first:length].copy())
    if sample.images:
        _add_images(record, sample)
    add_extras(record, sample, replay, evaluation=evaluation)
    return record


def _add_images(record: Any, sample: Sample) -> None:
    """Set the images of a sample's tokens, and the tensors that the trainer passes to the model.

    Raises:
        ConfigError: the sample has no processor, as one of a stored run.
    """
    import torch

    record.multimodal_inputs = {**(record.multimodal_inputs or {}), **(sample.multimodal_inputs or {})}
    inputs = sample.multimodal_train_inputs or {}
    record.multimodal_train_inputs = {name: torch.from_numpy(array) for name, array in inputs.items()}


def check_trainable(sample: Sample, *, needs_logprobs: bool = True) -> None:
    """Check that a rollout can be trained on, before it is scored.

    Raises:
        ConfigError: no sampled token, no prompt token, or logprobs that are missing and needed, or not finite.
    """
    sample.check()
    check_has_ids(sample)
    width = sample.response_length
    if not width:
        raise ConfigError.of(f"{sample!r}.loss_mask", "no 1", "at least one sampled token")
    if width == len(sample):
        raise ConfigError.of(f"{sample!r}.tokens", width, "at least one prompt token before the first sampled one")
    logprobs = sample.logprob_column
    if logprobs is None and not needs_logprobs:
        return
    if logprobs is None or not np.isfinite(logprobs).all():
        got = None if logprobs is None else "not all finite"
        raise ConfigError.of(f"{sample!r}.rollout_log_probs", got, "a finite logprob for each sampled token")


def prompt_of(sample: Any, request: Any) -> Any:
    """The prompt of our view of slime's sample: the request's, because a function may set slime's to anything."""
    return sample.prompt if request is None else request.prompt


def from_slime(sample: Any, request: Any = None) -> Sample:
    """Convert slime's sample to ours: its response columns are extended over the prompt.

    Args:
        sample: slime's sample, from a custom generate function or a sample hook.
        request: its prompt, with ``group_index`` and ``index``.

    Raises:
        ConfigError: a column is not as long as the response.
    """
    tokens = [int(token) for token in sample.tokens]
    width = int(sample.response_length)
    mask = [1] * width if sample.loss_mask is None else list(sample.loss_mask)
    logprobs = sample.rollout_log_probs
    lengths = {"loss_mask": len(mask), "rollout_log_probs": width if logprobs is None else len(logprobs)}
    if width > len(tokens) or set(lengths.values()) != {width}:
        raise ConfigError.of(f"slime sample {sample.index}", lengths, f"columns of its response_length, {width}")
    before = len(tokens) - width
    reward = sample.reward
    return Sample(
        prompt=prompt_of(sample, request),
        response=sample.response,
        tokens=tokens,
        loss_mask=[0] * before + mask,
        rollout_log_probs=None if logprobs is None else [0.0] * before + list(logprobs),
        reward=float(reward) if isinstance(reward, int | float) else None,
        metadata=dict(sample.metadata or {}),
        label=sample.label,
        status=getattr(sample.status, "value", sample.status),
        group_index=None if request is None else request.group_index,
        index=None if request is None else request.index,
        messages=list(getattr(sample, "messages", ())),
        metrics={"environment_seconds": float(sample.non_generation_time)},
    )


def trains(sample: Any) -> bool:
    """Whether slime would train a token of this sample.

    (slime 0.3.1, ray/rollout.py: RolloutManager._convert_samples_to_train_data)
    """
    if sample.remove_sample:
        return False
    return sample.response_length > 0 if sample.loss_mask is None else any(sample.loss_mask)


def reward_number(reward: Any, key: str | None, *, any_reward: bool = False) -> float | None:
    """The trained number of a reward: the entry ``key`` if the reward is a dict.

    Args:
        reward: a number, or a dict with numbers; ``None`` without a reward.
        key: the entry of a dict.
        any_reward: return 0.0 for a reward without a finite number: a function of the launch converts it later.

    Returns:
        ``None`` without a finite number.
    """
    number = _number(reward, key)
    return 0.0 if number is None and any_reward and reward is not None else number


def _number(reward: Any, key: str | None) -> float | None:
    value: Any = reward.get(key) if isinstance(reward, dict) and key is not None else reward
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # noqa: BLE001 - __float__ is foreign code: a tensor of two elements raises RuntimeError
        return None
    return number if math.isfinite(number) else None


def leaves(groups: Any) -> Iterator[Any]:
    """Flatten nested lists of samples, in order."""
    if isinstance(groups, list):
        for entry in groups:
            yield from leaves(entry)
    else:
        yield groups


def trained_versions(samples: Sequence[Sample], *, mask_earlier_versions: bool = False) -> list[str]:
    """The policy versions whose tokens a group would train."""
    if mask_earlier_versions:
        return [sample.versions[-1].version for sample in samples if sample.versions]
    return [span.version for sample in samples for span in sample.versions]


def check_training_batch(
    groups: Sequence[Any],
    *,
    groups_wanted: int,
    rollouts_in_group: int,
    read_number: Callable[[Any], float | None] = lambda reward: reward_number(reward, None),
    needs_logprobs: bool = True,
    replay: Replay = _NO_REPLAY,
) -> None:
    """Check the assumptions about a batch that slime itself does not check.

    Args:
        groups: slime's samples.
        groups_wanted: the number of groups.
        rollouts_in_group: the number of rollouts of each.
        read_number: the trained number of a reward.
        needs_logprobs: whether samples without logprobs are refused.
        replay: the columns that the trainer replays.

    Raises:
        ConfigError: a wrong number of groups, a group of another size, groups of different nesting, a rollout id of two
            rollouts, or a sample that cannot be trained.
    """
    if len(groups) != groups_wanted:
        raise ConfigError.of("batch", f"{len(groups)} groups", f"{groups_wanted} groups")
    seen: dict[Any, int] = {}
    fans_out = isinstance(groups[0][0], list)
    for number, group in enumerate(groups):
        if len(group) != rollouts_in_group:
            raise ConfigError.of(f"groups[{number}]", f"{len(group)} rollouts", f"{rollouts_in_group} rollouts")
        for rollout in group:
            if isinstance(rollout, list) is not fans_out:
                raise ConfigError.of(f"groups[{number}]", rollout, "one shape of groups throughout the batch")
            samples = rollout if fans_out else [rollout]
            ids = {sample.rollout_id for sample in samples}
            if len(ids) != 1 or None in ids or not seen.keys().isdisjoint(ids):
                raise ConfigError.of(f"groups[{number}].rollout_id", ids, "one number that no other rollout has")
            seen |= dict.fromkeys(ids, number)
            for sample in samples:
                place = f"groups[{number}], sample {sample.index}"
                check_shape(sample, place, needs_logprobs=needs_logprobs)
                check_replayed(sample, place, replay)
                if trains(sample) and Status(sample.status.value) not in _TRAINABLE:
                    raise ConfigError.of(f"{place}.status", sample.status, "another than ABORTED")
                if read_number(sample.reward) is None:
                    raise ConfigError.of(f"{place}.reward", sample.reward, "a finite number, under --reward-key if set")


def check_shape(sample: Any, place: str, *, needs_logprobs: bool = True) -> None:
    """Check the shapes that slime's tensors need of every sample, trained or not.

    Raises:
        ConfigError: a column is not as long as the response, the prompt is empty, or the status is not slime's.
    """
    width = sample.response_length
    lengths = {
        "loss_mask": width if sample.loss_mask is None else len(sample.loss_mask),
        "rollout_log_probs": 0 if sample.rollout_log_probs is None else len(sample.rollout_log_probs),
    }
    if sample.rollout_log_probs is None and not needs_logprobs:
        del lengths["rollout_log_probs"]
    if set(lengths.values()) != {width} or not 1 <= width < len(sample.tokens):
        failed = getattr(sample.status, "value", "") == "failed"
        remedy = "; a failed one without tokens needs one of loss_mask 0, and remove_sample" if failed else ""
        expected = f"columns of the response's length, {width}, at least one token, and a prompt{remedy}"
        raise ConfigError.of(place, {**lengths, "tokens": len(sample.tokens)}, expected)
    if not isinstance(sample.status, records().sample.Status):
        raise ConfigError.of(f"{place}.status", sample.status, "one of slime's Sample.Status")


def check_replayed(sample: Any, place: str, replay: Replay) -> None:
    """Check the columns that the trainer replays.

    Raises:
        ConfigError: one is missing, or does not cover the sample.
    """
    for name, flag in replay.fields.items():
        column = getattr(sample, name)
        length = len(sample.tokens) - 1 if name == "rollout_routed_experts" else sample.response_length + 1
        if column is None or len(column) != length:
            got = None if column is None else f"{len(column)} entries"
            raise ConfigError.of(f"{place}.{name}", got, f"{length} entries, since args.{flag} is set")


def _of_last_version(sample: Sample) -> Any:
    """A mask of the tokens of the sample's last policy version; all tokens if it has no versions."""
    if not sample.versions:
        return np.ones(len(sample), bool)
    last = np.zeros(len(sample), bool)
    for span in sample.versions:
        if span.version == sample.versions[-1].version:
            last[span.start : span.stop] = True
    return last


def _versions_of_completions(sample: Sample, completions: Sequence[CompletionRecord]) -> list[str]:
    """One entry per completion and version: a resumed completion has several.

    slime appends one for each request (slime 0.3.1, utils/types.py: Sample._apply_meta_info).
    """
    spans = sample.versions
    return [
        span.version for call in completions for span in spans if span.start < call.stop and span.stop > call.start
    ] or sample.weight_versions


def _plain_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt
    return [entry.to_chat() if isinstance(entry, Message) else entry for entry in prompt]
