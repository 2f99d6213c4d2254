"""Prompts from a file.

Invariant: an error names the file and the line. This module does not know the order in which prompts are handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.training.data_buffer import read_prompt

__all__ = ["load_prompts"]


def load_prompts(
    path: str | Path,
    *,
    limit: int | None = None,
    convert: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> list[Prompt]:
    """Read prompts from a JSONL file with lines ``{"prompt": text or messages, "label": …, "metadata": {…}}``.

    Args:
        path: the file.
        limit: number of prompts to read, from the start.
        convert: returns a row of that form for a row of another form.

    Raises:
        ConfigError: no such file, no rows, or a malformed row; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError.of("data", str(path), "a JSONL file that exists")
    prompts: list[Prompt] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(prompts) >= limit:
                break
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = msgspec.json.decode(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{place}: not JSON ({error})") from None
            if not isinstance(row, Mapping):
                raise ConfigError.of(place, row, 'an object with "prompt", and "label" and "metadata" where known')
            prompts.append(read_prompt(row if convert is None else convert(row), place))
    if not prompts:
        raise ConfigError.of("data", str(path), "at least one row")
    return prompts
