"""Prompts from data sets: JSONL, JSON, CSV and Parquet files, folders of them, ``datasets``, and the Hugging Face hub.

Invariant: a row becomes a prompt, or it is refused with its file, its line or row, and the field. A folder with files
of several splits is refused, so that no test row is trained. This module does not know how a task uses its rows.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec

from rollouts.base.extras import install_command
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.training.data_buffer import read_prompt

__all__ = ["Columns", "load_prompts", "rows_of"]

Source = str | Path | Iterable[Any]
_HUB = re.compile(r"hub:([^/]+/[^/]+)/(.+)")
_SPLIT = re.compile(r"(?:^|[-._/ ])(train|test|eval|validation|valid|val|dev)(?:[-._/ ]|$)")
_EXPECTED = (
    "a .jsonl, .json, .csv or .parquet file, a folder of them or of save_to_disk() of datasets, or "
    "hub:OWNER/DATASET/PATH"
)
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_UTF_8 = "got UTF-16; expected UTF-8: save the file with that encoding"
_FIELDS = ("prompt", "label", "metadata")
_ROW = 'an object with "prompt", and "label" and "metadata" where known'


class Columns(TypedDict, total=False):
    """The names of columns, where they differ from those of the fields; ``None`` is the field's name."""

    prompt: str | None
    label: str | None
    metadata: str | Sequence[str] | None
    """A column that contains objects; or several columns, which become the fields of the metadata."""


def load_prompts(
    source: Source,
    *,
    limit: int | None = None,
    convert: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    **columns: Unpack[Columns],
) -> list[Prompt]:
    """Read prompts from rows with the columns ``prompt`` (text or messages), ``label`` and ``metadata``, or named ones.

    For example ``load_prompts("train.parquet", prompt="question", label="answer")``.

    Args:
        source: as for :func:`rows_of`.
        limit: number of prompts to read, from the start.
        convert: returns a row with the three columns for a row of another form.
        columns: names of the columns. If one is given, other columns of the data are left out; if none is, a row with
            further columns is refused.

    Raises:
        ConfigError: a missing or unreadable file, no rows, or a malformed row; the message names file, row and field.
    """
    prompts: list[Prompt] = []
    named = any(name is not None for name in columns.values())
    for place, row in rows_of(source, **columns):
        if limit is not None and len(prompts) >= limit:
            break
        if not isinstance(row, Mapping):
            raise ConfigError.of(place, row, _ROW)
        row = row if convert is None else convert(row)
        if named:
            row = {field: row[field] for field in _FIELDS if field in row}
        prompts.append(read_prompt(row, place))
    if not prompts:
        raise ConfigError.of("data", _shown(source), "at least one row")
    return prompts


def rows_of(source: Source, **columns: Unpack[Columns]) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place, for messages.

    Args:
        source: a ``.jsonl``, ``.json`` (an array, or an object on each line), ``.csv`` or ``.parquet`` file; a folder
            of them, e.g. a downloaded data set of the Hugging Face hub; a folder that ``save_to_disk`` of ``datasets``
            wrote; ``hub:OWNER/DATASET/PATH`` for a file of a data set on the hub, e.g.
            ``hub:BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet``; or rows, e.g. a ``datasets.Dataset``.
        columns: names of the columns to yield as ``prompt``, ``label`` and ``metadata``; other columns stay.

    Raises:
        ConfigError: a missing file, a failed download, a file that cannot be read, or a row without a named column.
    """
    for place, row in _rows(source):
        if isinstance(row, Mapping):
            yield place, _with_fields(row, place, columns)
        else:
            yield place, row


def _with_fields(row: Mapping[str, Any], place: str, columns: Columns) -> Mapping[str, Any]:
    def value(column: str) -> Any:
        if column not in row:
            raise ConfigError.of(f"{place}: column", column, f"one of {', '.join(map(str, row))}")
        return row[column]

    fields: dict[str, Any] = {}
    for field, name in columns.items():
        if isinstance(name, str):
            fields[field] = value(name)
        elif isinstance(name, Sequence):
            fields[field] = {column: value(column) for column in name}
    return {**row, **fields}


def _rows(source: Source) -> Iterator[tuple[str, Any]]:
    if not isinstance(source, str | Path):
        from rollouts.training.row_types import check_rows  # here: most data are files

        check_rows(source, "data")
        for number, row in enumerate(source, 1):
            yield f"data, row {number}", row
        return
    for path in _files(source):
        yield from _READERS[path.suffix](path)


def _files(source: str | Path) -> list[Path]:
    named = _HUB.fullmatch(str(source))
    if named is not None:
        return [_downloaded(str(source), *named.groups())]
    path = Path(source)
    if path.is_file() and path.suffix in _READERS:
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
        raise ConfigError.of("data", str(source), f"one of its splits: {', '.join(splits)}, e.g. {path / splits[0]}")
    if (path / "state.json").is_file():
        return _saved_data_set(path)
    found = [file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix in _IN_FOLDERS]
    if not found:
        raise ConfigError.of("data", str(source), _EXPECTED)
    splits = sorted({split for file in found for split in _SPLIT.findall(file.relative_to(path).as_posix())})
    if len(splits) > 1:
        raise ConfigError.of("data", str(source), f"one split; the folder has files of {', '.join(splits)}")
    return found


def _downloaded(source: str, repository: str, name: str) -> Path:
    if Path(name).suffix not in _READERS:
        raise ConfigError.of("data", source, _EXPECTED)
    hub: Any = importlib.import_module("huggingface_hub")  # transformers brings it
    try:
        return Path(hub.hf_hub_download(repo_id=repository, filename=name, repo_type="dataset"))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"data: got {source!r}, which the hub does not give ({reason})") from error


def _saved_data_set(folder: Path) -> list[Path]:
    """The Arrow files of a data set (datasets 5.2.0, arrow_dataset.py: Dataset.save_to_disk)."""
    try:
        state = msgspec.json.decode((folder / "state.json").read_bytes())
        return [folder / part["filename"] for part in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / 'state.json'}: not the state of a data set ({error!r})") from None


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}, line {number}", _decoded(line, f"{path}, line {number}")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        is_array = next((line for line in file if line.strip()), b"").lstrip().startswith(b"[")
    if not is_array:
        yield from _json_lines(path)
        return
    for number, row in enumerate(_decoded(path.read_bytes(), str(path)), 1):
        yield f"{path}, row {number}", row


def _decoded(text: bytes, place: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        if text.startswith(b"PAR1"):
            raise ConfigError(f"{place}: got Parquet; expected JSON, or a name that ends in .parquet") from None
        if text.startswith(_UTF_16):
            raise ConfigError(f"{place}: {_NOT_UTF_8}") from None
        if _HALF_A_PAIR.search(text) and _is_json(text):
            expected = "Unicode text, as json.dumps writes it from text without lone surrogates"
            raise ConfigError(
                f"{place}: a string has half of a surrogate pair ({error}); expected {expected}"
            ) from None
        raise ConfigError(f"{place}: not JSON ({error})") from None


def _is_json(text: bytes) -> bool:
    """Whether Python's decoder reads it, which takes half of a surrogate pair for a character."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a file with a header; an empty cell is a missing value."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows, [])
            if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
                raise ConfigError.of(f"{path}, line 1", header[0], "columns separated by commas")
            for cells in filter(None, rows):
                place = f"{path}, line {rows.line_num}"
                if len(cells) != len(header):
                    raise ConfigError.of(place, cells, f"{len(header)} cells, as the header has")
                yield place, {name: cell or None for name, cell in zip(header, cells, strict=True)}
        except (csv.Error, UnicodeDecodeError) as error:
            if path.read_bytes()[:2] in _UTF_16:
                raise ConfigError(f"{path}, line 1: {_NOT_UTF_8}") from None
            raise ConfigError(f"{path}: not CSV in UTF-8 ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    parquet = _pyarrow("parquet", path)
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}, row {number}", row
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not Parquet ({error})") from error


def _arrow(path: Path) -> Iterator[tuple[str, Any]]:
    ipc = _pyarrow("ipc", path)
    try:
        with path.open("rb") as file, ipc.open_stream(file) as batches:
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}, row {number}", row
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a stream of Arrow ({error})") from error


def _pyarrow(module: str, path: Path) -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError.of("data", str(path), f"a .jsonl file, or {install_command('parquet')}")
    return importlib.import_module(f"pyarrow.{module}")


def _shown(source: Source) -> str:
    return str(source) if isinstance(source, str | Path) else type(source).__name__


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
_IN_FOLDERS = (".jsonl", ".csv", ".parquet")
