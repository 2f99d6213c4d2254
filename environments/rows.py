"""Rows of data sets: JSONL or Parquet files, folders of them, or a file of the Hugging Face hub."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollouts.base.extras import install_command
from rollouts.errors import ConfigError

__all__ = ["rows_of"]

_HUB = re.compile(r"hub:([^/]+/[^/]+)/(.+)")
_KINDS = (".jsonl", ".parquet")


def rows_of(source: str) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place, for messages.

    Args:
        source: a ``.jsonl`` or ``.parquet`` file; a folder of them, e.g. a downloaded data set of the Hugging Face
            hub; or ``hub:OWNER/DATASET/PATH`` for such a file of a data set on the hub, e.g.
            ``hub:BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet``.

    Raises:
        ConfigError: a missing file, a failed download, or a file that cannot be read.
    """
    for path in _files(source):
        for number, row in enumerate(_rows(path), 1):
            yield f"{path}, row {number}", row


def _files(source: str) -> list[Path]:
    named = _HUB.fullmatch(str(source))
    if named is None:
        path = Path(source)
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        found = [file for file in found if file.is_file() and file.suffix in _KINDS]
        if not found:
            raise ConfigError.of(
                "data", str(source), "a .jsonl or .parquet file, a folder of them, or hub:OWNER/DATASET/PATH of one"
            )
        return found
    hub: Any = importlib.import_module("huggingface_hub")  # transformers brings it
    try:
        return [Path(hub.hf_hub_download(repo_id=named[1], filename=named[2], repo_type="dataset"))]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"data: got {source!r}, which the hub does not give ({reason})") from error


def _rows(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError.of("data", str(path), f"a .jsonl file, or {install_command('parquet')}")
        parquet: Any = importlib.import_module("pyarrow.parquet")
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: not Parquet ({error})") from error
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield msgspec.json.decode(line)
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{path}, line {number}: not JSON ({error})") from None
