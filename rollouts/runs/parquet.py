"""Samples as Parquet: the batches of a run, whose free-form columns are JSON text, and exports (``columns.py``).

Invariant: :func:`read` yields the rows of a batch as written; float32 logprobs are equal bit for bit. Files are written
and read a few rows at a time, so memory does not grow with their size. Every page has a checksum, and a file from
:func:`encode` has one of the whole file in its footer. Needs pyarrow (extra ``parquet``), imported at the first write
or read.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import mmap
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from rollouts.base.extras import install_command, is_installed
from rollouts.base.storable import to_plain
from rollouts.errors import ConfigError
from rollouts.runs.columns import COLUMNS, IMAGE, SPAN, TIME, Type
from rollouts.runs.reading import reading

__all__ = ["RowWriter", "available", "damage_in", "encode", "group_indices", "heads", "read", "read_some"]

_JSON_COLUMNS = ("prompt", "metadata", "label", "messages", "metrics", "failure")
"""Columns of a batch without a fixed schema; each value is one JSON text."""
_EXPORTED: Mapping[str, Type] = {name: column.type for name, column in COLUMNS.items()}
_STORED: Mapping[str, Type] = {
    name: "string" if name in _JSON_COLUMNS else kind for name, kind in _EXPORTED.items() if name != "prompt_messages"
}
"""The columns of a batch."""

_ROWS_AT_ONCE = 512
_TOKENS_AT_ONCE = 1 << 16
"""Limits of a row group; a reader has one row group in memory."""

_SEAL = b"rollouts-crc32:"
_UNSEALED = b"00000000"
"""Placeholder after :data:`_SEAL` in the footer; the checksum of the file, computed with it, replaces it."""


def available() -> bool:
    """Whether pyarrow is installed."""
    return is_installed("pyarrow")


class RowWriter:
    """Streaming writer of rows to an open file (zstd).

    Args:
        file: the open file; it is not closed.
        columns: the types of the columns; by default those of an export.
        notes: key-value metadata of the footer.
        sized: the column whose length bounds a row group, where rows have it.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    def __init__(
        self,
        file: BinaryIO,
        columns: Mapping[str, Type] = _EXPORTED,
        notes: Mapping[str, bytes] | None = None,
        sized: str = "tokens",
    ) -> None:
        self._pyarrow, parquet = _pyarrow()
        fields = [self._pyarrow.field(name, _arrow_type(self._pyarrow, kind)) for name, kind in columns.items()]
        self._schema = self._pyarrow.schema(fields)
        self._file = parquet.ParquetWriter(file, self._schema, compression="zstd", write_page_checksum=True)
        if notes:
            self._file.add_key_value_metadata(notes)
        self._sized = sized
        self._waiting: list[dict[str, Any]] = []
        self._tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
        self._file.close()

    def write(self, row: dict[str, Any]) -> None:
        """Add a row."""
        self._waiting.append(row)
        self._tokens += len(row.get(self._sized, ()))
        if len(self._waiting) >= _ROWS_AT_ONCE or self._tokens >= _TOKENS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            with reading("a row"):
                try:
                    table = self._pyarrow.Table.from_pylist(self._waiting, schema=self._schema)
                except UnicodeEncodeError:  # half a character in a name; JSON has it replaced, too
                    table = self._pyarrow.Table.from_pylist(to_plain(self._waiting), schema=self._schema)
            self._file.write_table(table)
        self._waiting.clear()
        self._tokens = 0


def encode(rows: Iterable[dict[str, Any]], to_json: Callable[[Any], bytes] = msgspec.json.encode) -> bytes:
    """Encode stored samples as a Parquet file with a checksum of the whole file.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    buffer = io.BytesIO()
    with RowWriter(buffer, _STORED, {"rollouts": _SEAL + _UNSEALED}) as writer:
        for row in rows:
            texts = {name: to_json(row[name]).decode() for name in _JSON_COLUMNS}
            spans = [dict(zip(SPAN, span, strict=True)) for span in row["versions"]]
            times = [dict(zip(TIME, span, strict=True)) for span in row["times"]]
            images = [dict(zip(IMAGE, span, strict=True)) for span in row["images"]]
            writer.write({**row, **texts, "versions": spans, "times": times, "images": images})
    start, crc = _sealed_at(buffer.getvalue())
    buffer.seek(start)
    buffer.write(b"%08x" % crc)
    return buffer.getvalue()


def _sealed_at(data: bytes | mmap.mmap) -> tuple[int, int]:
    """Offset of the file's checksum, -1 if it has none; and the expected checksum."""
    start = data.rfind(_SEAL) + len(_SEAL)
    if start < len(_SEAL):
        return -1, 0
    with memoryview(data) as view:
        crc = zlib.crc32(_UNSEALED, zlib.crc32(view[:start]))
        return start, zlib.crc32(view[start + len(_UNSEALED) :], crc)


def damage_in(path: Path) -> str | None:
    """Describe the damage in a file from :func:`encode` and its location; ``None`` if there is none.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            return "damaged (it is empty)"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start, crc = _sealed_at(data)
            if start >= 0 and data[start : start + len(_UNSEALED)] == b"%08x" % crc:
                return None
    where = "in its footer, or between its columns"
    try:
        with _opened(path) as parquet:
            first = 1
            for number in range(parquet.num_row_groups):
                last = first + parquet.metadata.row_group(number).num_rows - 1
                where = f"in rows {first} to {last}"
                for column in parquet.schema_arrow.names:
                    where = f"in rows {first} to {last}, column {column}"
                    parquet.read_row_group(number, columns=[column])
                first = last + 1
            where = "in its footer, or between its columns"
    except Exception as error:  # noqa: BLE001 - a damaged file may make a library raise anything
        return f"damaged {where} ({error})"
    return f"damaged {where} (the checksum of the file does not fit)"


def _opened(path: Path) -> Any:
    return _pyarrow()[1].ParquetFile(path, page_checksum_verification=True)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file.

    Raises:
        ConfigError: pyarrow is not installed, or the file is damaged.
    """
    yield from _rows(path, lambda file: file.iter_batches(batch_size=16))


def read_some(path: Path, start: int, count: int) -> list[dict[str, Any]]:
    """Read ``count`` rows from row ``start`` (from 0); only their row groups are read.

    Raises:
        ConfigError: as :func:`read`.
    """

    def tables(file: Any) -> Iterator[Any]:
        before = 0
        for number in range(file.num_row_groups):
            after = before + file.metadata.row_group(number).num_rows
            if after > start and before < start + count:
                first = max(start - before, 0)
                yield file.read_row_group(number).slice(first, start + count - before - first)
            before = after

    return list(_rows(path, tables))


def group_indices(path: Path) -> list[int]:
    """The group index of each row; only this column is read.

    Raises:
        ConfigError: as :func:`read`.
    """
    with _reporting_damage(path), _opened(path) as file:
        groups: list[int] = file.read(columns=["group_index"]).column(0).to_pylist()
    return groups


def heads(path: Path) -> list[tuple[int, int | None]]:
    """The group index and the index of each row; only these columns are read.

    Raises:
        ConfigError: as :func:`read`.
    """
    with _reporting_damage(path), _opened(path) as file:
        table = file.read(columns=["group_index", "index"])
        groups, indices = (table.column(name).to_pylist() for name in ("group_index", "index"))
    return list(zip(groups, indices, strict=True))


def _rows(path: Path, tables: Callable[[Any], Iterable[Any]]) -> Iterator[dict[str, Any]]:
    with _reporting_damage(path), _opened(path) as file:
        for table in tables(file):
            for row in table.to_pylist():
                row.update({name: msgspec.json.decode(row[name]) for name in _JSON_COLUMNS})
                row["versions"] = [[span["version"], span["start"], span["stop"]] for span in row["versions"]]
                if row.get("times") is not None:  # earlier versions have none
                    row["times"] = [[span[name] for name in TIME] for span in row["times"]]
                row["images"] = [[span[name] for name in IMAGE] for span in row.get("images") or ()]
                for completion in row.get("completions") or ():  # version 0.1 has another name
                    for name in ("continues", "temperature", "logprobs_of"):
                        if completion.get(name) in (None, False):
                            completion.pop(name, None)  # a row of JSON has it only where it is true or known
                yield row


@contextlib.contextmanager
def _reporting_damage(path: Path) -> Iterator[None]:
    pyarrow, _ = _pyarrow()
    try:
        yield
    except (pyarrow.ArrowException, OSError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: corrupted, not a Parquet file of samples ({error})") from None


def _pyarrow() -> tuple[Any, Any]:
    if not available():
        raise ConfigError.of("format", "parquet", f"pyarrow, which is not installed: {install_command('parquet')}")
    return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")


def _arrow_type(pa: Any, kind: Type) -> Any:
    if isinstance(kind, str):
        return getattr(pa, kind)()
    if isinstance(kind, Mapping):
        return pa.struct({name: _arrow_type(pa, inner) for name, inner in kind.items()})
    (inner,) = kind
    return pa.list_(_arrow_type(pa, inner))
