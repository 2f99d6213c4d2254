"""``slime-pt``: the ``.pt`` files of ``--save-debug-rollout-data`` of slime, and of its fork miles.

A file is ``{"rollout_id": int, "samples": [Sample.to_dict(), …]}`` (slime 0.3.1, ray/rollout.py and utils/types.py).
Mask and logprobs are as wide as the response, the end of the tokens; a mask of ``None`` trains the whole response.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollouts.audit.readers.lines import converted
from rollouts.audit.readers.pt_file import load_plain
from rollouts.audit.rows import AuditedRow, Finding, Reader
from rollouts.errors import ConfigError

__all__ = ["READER"]

_FORM = "the samples of slime's --save-debug-rollout-data"
_FAILED = ("failed", "aborted")


class _Sample(msgspec.Struct):
    tokens: list[int]
    response_length: int
    status: str
    response: str | None = None
    prompt: Any = None
    label: Any = None
    reward: Any = None
    loss_mask: list[bool | float | None] | None = None
    rollout_log_probs: list[float | None] | None = None
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    remove_sample: bool = False
    multimodal_inputs: Any = None
    multimodal_train_inputs: Any = None


def _read(path: Path) -> Iterator[AuditedRow]:
    data = load_plain(path)
    if not isinstance(data, dict) or not isinstance(data.get("samples"), list):
        raise ConfigError.of("--format", f"{path}: {type(data).__name__}", _FORM)
    places = ((f"{path.name}, sample {number}", _plain(one)) for number, one in enumerate(data["samples"]))
    yield from converted(places, _Sample, _FORM, _row)


def _plain(sample: Any) -> Any:
    """A sample whose token columns are lists: some rollout functions store tensors."""
    if not isinstance(sample, dict):
        return sample
    names = ("tokens", "loss_mask", "rollout_log_probs")
    lists = {name: sample[name].tolist() for name in names if hasattr(sample.get(name), "tolist")}
    return {**sample, **lists}


def _row(place: str, sample: _Sample) -> Iterator[AuditedRow]:
    width = len(sample.tokens)
    length = min(max(0, sample.response_length), width)
    before = width - length
    mask: list[Any] = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    logprobs = sample.rollout_log_probs
    one = sample.index if sample.rollout_id is None else sample.rollout_id
    names = f"group {sample.group_index} · index {sample.index}"
    row = AuditedRow(
        f"{place} ({names})",
        tokens=sample.tokens,
        mask=[0] * before + mask,
        logprobs=None if logprobs is None else [0.0] * before + logprobs,
        texts=() if sample.response is None else [(before, width, sample.response)],
        group=sample.group_index,
        rollout=None if one is None else (sample.group_index, one),
        prompt=sample.prompt,
        label=sample.label,
        rewards=_numbers(sample.reward),
        failed=f"status {sample.status!r}" if sample.status in _FAILED else None,
        has_status=True,
        trained=not sample.remove_sample,
        ended=sample.status == "completed",
        has_images=bool(sample.multimodal_inputs or sample.multimodal_train_inputs),
    )
    if length != sample.response_length:
        got, expected = sample.response_length, f"0 to {width}, the number of tokens"
        row.findings.append(Finding.of("broken", "mask", f"{row.place}, response_length", got, expected))
    yield row


def _numbers(reward: Any) -> list[float | None]:
    """The numbers of a reward, which may be a dict of them (``--reward-key``)."""
    values = list(reward.values()) if isinstance(reward, dict) else [reward]
    return [_number(value) for value in values if isinstance(value, int | float)] or [None]


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


READER = Reader(
    _read,
    (".pt",),
    lacks={
        "requests": "the ids of each request are not in the file, so that a reply which was encoded again from its "
        "text, and a thought that is missing in the next request, are seen only with --model",
        "advantages": "the file has no advantages",
    },
    fixed_groups=True,
)
