"""Samples of a failed rollout or group, as they are recorded.

Invariant: all parts that are valid are kept, and the recorded samples can be written and read again. The fields of the
data are those of the prompt. This module calls no user function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollouts.base.storable import check_readable
from rollouts.base.validators import finite
from rollouts.concurrency.times import Timeline
from rollouts.dtypes import Prompt, StopReason
from rollouts.errors import Failure, GenerateFailure
from rollouts.training.sample import Sample
from rollouts.training.sample_validator import MAX_FLOAT, copied, pack
from rollouts.training.status import Status

__all__ = ["failed_rollout", "pack_lossy"]


def failed_rollout(samples: Sequence[Sample], request: Prompt, failure: Failure) -> list[Sample]:
    """The numbered samples of a rollout that failed, maybe by what its generate function returned."""
    for sample in samples:
        if sample.trainer_record is None:  # else they may be others than the group's
            sample.prompt, sample.label = request.prompt, copied(request.label)
    kept = pack_lossy(samples, request)
    for sample in kept:
        sample.status, sample.failure = Status.FAILED, failure
    if kept[-1].stop_reason is StopReason.FORKED:
        kept[-1].stop_reason = None
    if any(sample.parent is not None for sample in kept):
        from rollouts.training.branching import check_parents  # here: few rollouts have branches

        try:
            check_parents(kept, "failed_rollout")
        except GenerateFailure:
            for sample in kept:
                sample.parent, sample.shared = None, 0
    return kept


def pack_lossy(samples: Sequence[Sample], prompt: Prompt) -> list[Sample]:
    """Pack samples of a failed rollout of a prompt for the record; only values that do not pack are lost."""
    for sample in samples:
        try:
            pack(sample)
        except Exception:  # noqa: BLE001 - a user's value may raise anything
            _lose_unfit(sample, prompt)
    return list(samples)


def _lose_unfit(sample: Sample, prompt: Prompt) -> None:
    """Empty a sample, and give back each part with which it packs."""
    parts = [dict(_readable(sample, part)) for part in _PARTS]
    for part in _PARTS:
        _set(sample, {name: empty() for name, empty in part.items()})
    sample.label = copied(prompt.label)
    for values in [*parts, *map(_fitting, parts)]:
        before = {name: getattr(sample, name) for name in values}
        try:
            _set(sample, values)
            pack(sample)
        except Exception:  # noqa: BLE001 - this part does not pack
            _set(sample, before)


_PARTS: tuple[dict[str, Callable[[], Any]], ...] = (
    {"tokens": list, "loss_mask": list, "rollout_log_probs": lambda: None, "versions": list, "completions": list,
     "step_completions": lambda: None, "images": tuple, "named_images": dict, "response": str,
     "loss_multiplier": lambda: 1.0, "advantages": lambda: None, "teacher_log_probs": lambda: None},
    {"reward": lambda: None}, {"label": lambda: None}, {"step_rewards": list}, {"messages": list},
    {"metrics": dict}, {"metadata": dict}, {"times": Timeline}, {"stop_reason": lambda: None},
    {"failure": lambda: None}, {"history": lambda: None}, {"tools": lambda: None},
    {"seat": str, "conversation": int, "parent": lambda: None, "shared": int},
)  # fmt: skip
"""The fields of a sample that pack or do not pack together, with their values if they do not."""


def _readable(sample: Sample, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        with contextlib.suppress(Exception):  # of a record that cannot be read
            yield name, getattr(sample, name)


def _set(sample: Sample, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(sample, name, value)


def _fitting(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of metrics and metadata that fit by themselves."""
    fits = {"metrics": _is_metric, "metadata": _is_plain}
    return {
        name: {key: entry for key, entry in value.items() if fits[name](key, entry)}
        for name, value in values.items()
        if name in fits and isinstance(value, dict)
    }


def _is_metric(name: Any, value: Any) -> bool:
    return isinstance(name, str) and finite(value) is not None and abs(value) <= MAX_FLOAT


def _is_plain(name: Any, value: Any) -> bool:
    with contextlib.suppress(Exception):  # a key or a value that does not pack
        check_readable("metadata", {name: value})
        return True
    return False
