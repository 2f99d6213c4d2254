"""Refusal of values that are not rows, although Python can iterate over them: paths, files, tables and mappings.

Invariant: a value that :func:`check_rows` accepts yields a row for each prompt. This module reads no row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from rollouts.errors import ConfigError

__all__ = ["check_rows"]


def check_rows(prompts: Any, field: str) -> None:
    """Refuse a value that is not a sequence of rows, above all if iterating over it yields something else."""
    if isinstance(prompts, os.PathLike):
        raise ConfigError(f"{field}: got a path, {os.fspath(prompts)!r}; expected load_prompts(path)")
    if hasattr(prompts, "readline"):
        raise ConfigError(f"{field}: got an open file; expected load_prompts(path)")
    rows = _rows_of_table(prompts)
    if rows is not None:
        raise ConfigError(f"{field}: got a {type(prompts).__name__}; expected rows: {rows}")
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        is_file = isinstance(prompts, str) and prompts.endswith((".jsonl", ".json", ".csv", ".parquet"))
        raise ConfigError.of(field, prompts, "a list of prompts" + (", or load_prompts(path)" if is_file else ""))


def _rows_of_table(value: Any) -> str | None:
    """How to get rows from a table, which yields columns when it is iterated; ``None`` if the value is not one.

    A data set of ``datasets`` yields rows: it has ``column_names``, but not ``columns``.
    """
    ways = {
        "to_pylist": "table.to_pylist()",  # pyarrow
        "to_dicts": "df.to_dicts()",  # polars
        "to_dict": "df.to_dict('records')",  # pandas, and libraries with its interface
        "collect": "df.collect().to_dicts()",  # a lazy frame of polars
    }
    if not hasattr(value, "columns"):
        return None
    return next((rows for method, rows in ways.items() if hasattr(value, method)), None)
