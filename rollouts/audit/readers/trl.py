"""``trl``: ``completions_*.parquet`` of TRL's trainers (``log_completions=True``).

A row has ``step``, ``prompt``, ``completion``, a column for each reward function and for each extra value, and
``advantage`` (TRL 1.16.0, trainer/grpo_trainer.py: GRPOTrainer.log). A reward of NaN is missing.
Rows of one prompt and step are a group. It has no ids, mask or logprobs. The trainer keeps the last
``generation_batch_size`` rows, those of evaluations included, so that the first group of a file may be cut.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollouts.audit.rows import AuditedRow, Reader
from rollouts.base.extras import install_command
from rollouts.errors import ConfigError
from rollouts.runs.parquet import available

__all__ = ["READER"]

_FORM = "a file of TRL's completions, with the columns step, prompt, completion and advantage"
_TEXT = "the file has text and no token ids"
_NAMES = ("step", "prompt", "completion", "advantage")


def _read(path: Path) -> Iterator[AuditedRow]:
    if not available():
        raise ConfigError.of("FILE", "no pyarrow", f"pyarrow installed: {install_command('parquet')}")
    pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        file = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError.of("FILE", f"{path} ({error})", "a Parquet file") from error
    with file:
        columns = file.schema_arrow.names
        if not set(_NAMES) <= set(columns):
            raise ConfigError.of("--format", f"{path} with the columns {', '.join(columns)}", _FORM)
        numeric = [
            field.name
            for field in file.schema_arrow
            if field.name not in _NAMES and pyarrow.types.is_floating(field.type)
        ]
        number = 0
        for batch in file.iter_batches(512, columns=[*_NAMES, *numeric]):
            for row in batch.to_pylist():
                yield _row(f"{path.name}, row {number}", row, numeric)
                number += 1


def _row(place: str, row: dict[str, Any], numeric: list[str]) -> AuditedRow:
    given = [row[name] for name in numeric]
    rewards = [None if reward is None or math.isnan(reward) else reward for reward in given]
    several = len(numeric) > 1  # where one reward function does not apply, another does
    return AuditedRow(
        place,
        group=(row["step"], repr(row["prompt"])),
        rewards=([reward for reward in rewards if reward is not None] or [None]) if several else rewards,
        advantage=row["advantage"],
    )


READER = Reader(
    _read,
    (".parquet",),
    lacks={
        **dict.fromkeys(("requests", "text", "vocabulary", "mask", "logprobs", "roles", "once", "weights"), _TEXT),
        "rows": "a row has no name or number, and equal texts may be sampled twice",
        "failures": "the file has no status of a rollout",
    },
    keeps_last=True,
)
