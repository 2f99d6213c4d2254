"""``nemo-rl``: ``train_data_step*.jsonl``, which NeMo-RL's GRPO logs after each step.

A line has one sequence: each value is a list of one, padded to the width of the batch, with ``input_lengths``
(NeMo-RL, algorithms/grpo.py: log_data; utils/logger.py: log_batched_dict_as_jsonl). ``prev_logprobs`` are those of the
trainer's forward pass before the update, so that law 8 is judged without weights; they are zeros where
``loss_fn.force_on_policy_ratio`` skips that pass (algorithms/grpo.py: grpo_train).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollouts.audit.readers.lines import converted, read_lines
from rollouts.audit.rows import AuditedRow, Finding, Reader

__all__ = ["READER"]

_FORM = "lines of NeMo-RL's train_data_step*.jsonl with token_ids and token_loss_mask"
Numbers = list[float | None]


class _Line(msgspec.Struct):
    token_ids: list[list[int]]
    token_loss_mask: list[list[float]]
    input_lengths: list[int]
    generation_logprobs: list[Numbers] | None = None
    prev_logprobs: list[Numbers] | None = None
    sample_loss_mask: list[float] | None = None
    rewards: Numbers | None = None
    idx: int | None = None


def _read(path: Path) -> Iterator[AuditedRow]:
    yield from converted(read_lines(path), _Line, _FORM, _row)


def _row(place: str, line: _Line) -> Iterator[AuditedRow]:
    optional = (line.generation_logprobs, line.prev_logprobs, line.sample_loss_mask, line.rewards)
    columns = [line.token_ids, line.token_loss_mask, line.input_lengths, *(one for one in optional if one is not None)]
    lengths = {len(one) for one in columns}
    if lengths != {1}:
        finding = Finding.of("broken", "rows", place, f"columns of {sorted(lengths)} sequences", "one sequence a line")
        yield AuditedRow(place, findings=[finding], trained=False)
        return
    mask, whole = line.token_loss_mask[0], len(line.token_ids[0])
    width = min(max(0, line.input_lengths[0]), whole)
    trainer = line.prev_logprobs[0][:width] if line.prev_logprobs else []
    row = AuditedRow(
        place,
        tokens=line.token_ids[0][:width],
        mask=mask[:width],
        logprobs=None if line.generation_logprobs is None else line.generation_logprobs[0][:width],
        trainer_logprobs=trainer if any(trainer) else None,
        rollout=line.idx,
        rewards=line.rewards,
        trained=line.sample_loss_mask is None or any(line.sample_loss_mask),
    )
    padding = next((position for position, value in enumerate(mask[width:], width) if value), None)
    if padding is not None:
        expected = f"0 from position {width} on, the input length"
        row.findings.append(
            Finding.of("broken", "mask", f"{place}, token_loss_mask, position {padding}", mask[padding], expected)
        )
    if width != line.input_lengths[0]:
        expected = f"0 to {whole}, the ids of the line"
        row.findings.append(Finding.of("broken", "mask", f"{place}, input_lengths", line.input_lengths[0], expected))
    yield row


READER = Reader(
    _read,
    (".jsonl",),
    lacks={
        "requests": "the ids of each request are not in the file",
        "text": "its column content is rendered from messages and is not the text of the ids",
        "once": "a line does not name its rollout",
        "failures": "the file has no status of a rollout",
        "groups": "a line does not name its group",
        "advantages": "a line does not name its group, whose rewards decide the advantage",
    },
)
