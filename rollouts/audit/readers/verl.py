"""``verl``: the JSON lines of ``trainer.rollout_data_dir``.

A line has ``input``, ``output``, ``score``, ``gts``, ``step``, and in later versions ``uid`` or ``request_id``; the
text is decoded without special tokens (verl, trainer/ppo/ray_trainer.py: _dump_generations). It has no ids, mask or
logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollouts.audit.readers.lines import converted, read_lines
from rollouts.audit.rows import AuditedRow, Finding, Reader

__all__ = ["READER"]

_FORM = "lines of verl's rollout_data_dir with input, output and score"
_TEXT = (
    "the file has text, decoded without special tokens, and no token ids; a hook that saves the batch itself "
    "(DataProto.save_to_disk) would have them"
)


class _Line(msgspec.Struct):
    input: str
    output: str
    score: float | None
    gts: Any = None
    step: Any = None
    uid: str | None = None
    request_id: str | None = None


def _read(path: Path) -> Iterator[AuditedRow]:
    yield from converted(read_lines(path), _Line, _FORM, _row)


def _row(place: str, line: _Line) -> Iterator[AuditedRow]:
    row = AuditedRow(
        place,
        group=None if line.uid is None else (line.step, line.uid),
        rollout=line.request_id,
        prompt=line.input,
        label=line.gts,
        rewards=[line.score],
    )
    if not line.output:
        row.findings.append(Finding.of("unusual", "rows", f"{place}, output", "no text", "the text of a reply"))
    yield row


READER = Reader(
    _read,
    (".jsonl",),
    lacks={
        **dict.fromkeys(("requests", "text", "vocabulary", "mask", "logprobs", "roles", "once", "weights"), _TEXT),
        "failures": "the file has no status of a rollout",
        "advantages": "the file has no advantages",
    },
)
