"""Stored samples as Parquet: token columns typed, everything free-form as JSON text.

Invariant: :func:`read` gives back the rows that :func:`encode` was given, as JSON would: float32 logprobs bit for bit.
Needs pyarrow (extra ``parquet``), which is imported when a file is written or read, not before.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.errors import ConfigError

__all__ = ["available", "encode", "read"]

_JSON = ("prompt", "metadata", "label", "messages", "metrics", "failure")
"""Columns whose content has no fixed shape; each holds one JSON text."""


def available() -> bool:
    """Is pyarrow installed?"""
    return importlib.util.find_spec("pyarrow") is not None


def encode(rows: Sequence[dict[str, Any]], to_json: Callable[[Any], bytes] = msgspec.json.encode) -> bytes:
    """A Parquet file (zstd) of stored samples; ``to_json`` writes the free-form columns.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    pyarrow, parquet = _pyarrow()
    flat = []
    for row in rows:
        texts = {name: to_json(row[name]).decode() for name in _JSON}
        spans = [{"version": version, "start": start, "stop": stop} for version, start, stop in row["versions"]]
        flat.append({**row, **texts, "versions": spans})
    table = pyarrow.Table.from_pylist(flat, schema=_schema(pyarrow))
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that :func:`encode` made.

    Raises:
        ConfigError: pyarrow is not installed, or the file is damaged.
    """
    pyarrow, parquet = _pyarrow()
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        for row in rows:
            row.update({name: msgspec.json.decode(row[name]) for name in _JSON})
            row["versions"] = [[span["version"], span["start"], span["stop"]] for span in row["versions"]]
    except (pyarrow.ArrowException, OSError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: corrupted, not a Parquet file of samples ({error})") from None
    return rows


def _pyarrow() -> tuple[Any, Any]:
    if not available():
        raise ConfigError.of("format", "parquet", 'pyarrow, which is not installed: pip install "rollouts[parquet]"')
    return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")


def _schema(pa: Any) -> Any:
    span = {"version": pa.string(), "start": pa.int32(), "stop": pa.int32()}
    call = {
        "request_id": pa.string(),
        "start": pa.int32(),
        "stop": pa.int32(),
        "finish_reason": pa.string(),
        "prompt_digest": pa.int64(),
        "cached_tokens": pa.int32(),
        "seconds": pa.float64(),
    }
    digests = {"tokens": pa.int64(), "loss_mask": pa.int64(), "rollout_log_probs": pa.int64()}
    columns = {
        "prompt": pa.string(),
        "response": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "rollout_log_probs": pa.list_(pa.float32()),
        "response_length": pa.int32(),
        "reward": pa.float64(),
        "metadata": pa.string(),
        "label": pa.string(),
        "group_index": pa.int64(),
        "index": pa.int64(),
        "rollout_id": pa.int64(),
        "status": pa.string(),
        "stop_reason": pa.string(),
        "versions": pa.list_(pa.struct(span)),
        "messages": pa.string(),
        "calls": pa.list_(pa.struct(call)),
        "metrics": pa.string(),
        "failure": pa.string(),
        "history": pa.string(),
        "step_rewards": pa.list_(pa.float64()),
        "outcome": pa.string(),
        "reason": pa.string(),
        "batch": pa.int64(),
        "digests": pa.struct(digests),
    }
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])
