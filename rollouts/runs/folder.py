"""The readers of the samples in a run's folder, whose files ``layout.py`` names.

Invariant: a row is a sample's :meth:`Sample.to_dict` plus ``outcome``, ``reason``, ``batch`` and the ``digests`` of its
columns; float32 logprobs are read back bit for bit. Every line, ``run.json`` and every batch has a checksum; a line
that does not match its checksum is refused. This module writes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.errors import ConfigError
from rollouts.runs import parquet
from rollouts.runs.checksums import CHECKSUM, is_sound
from rollouts.runs.images import ImageFolder
from rollouts.runs.info import batches_written, is_growing, read_info
from rollouts.runs.layout import JOURNAL, OUTCOMES, StoredOutcome, Which, run_files
from rollouts.runs.reading import decoded_object, reading
from rollouts.runs.run_history import RunHistory
from rollouts.runs.tools import ToolFolder, with_named_tools
from rollouts.training.sample_columns import column_digests
from rollouts.training.sample_fields import with_current_names
from rollouts.training.types import Sample

__all__ = ["Row", "journal_rows", "lines_of", "read_file", "read_rows", "read_waiting", "whole_size"]

_ADDED = ("outcome", "reason", "batch", "digests")


@attrs.frozen
class Row:
    """One stored sample and its location. ``data`` is the row as stored, not checked."""

    run: Path
    file: str
    """Relative to the run's folder."""
    line: int
    """Line number from 1; the row number in a Parquet file, the group in the journal."""
    outcome: StoredOutcome
    data: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.run / self.file}, line {self.line}"

    def sample(self) -> Sample:
        """Convert the row to a sample.

        Raises:
            ConfigError: the row is not a sample; the message names file and line.
        """
        with reading(self):
            fields = {key: value for key, value in self.data.items() if key not in _ADDED}
            try:
                return Sample.from_dict(ToolFolder(self.run).restored(fields), ImageFolder(self.run).load)
            except (ConfigError, TypeError, ValueError) as error:
                raise ConfigError(f"{self}: not a sample ({error})") from None


def read_rows(path: str | Path, outcome: Which = "kept") -> Iterator[Row]:
    """Yield the stored samples of a run in file order, then those of an active or killed run that only its journal has.

    Raises:
        ConfigError: ``path`` is not a run, the outcome is unknown, or a line is corrupted (named with its file).
    """
    growing = is_growing(path)
    if outcome != "all" and outcome not in OUTCOMES:
        raise ConfigError.of("outcome", outcome, f'one of {list(OUTCOMES)}, or "all"')
    return _rows(Path(path), outcome, growing)


def _rows(path: Path, outcome: Which, growing: bool) -> Iterator[Row]:
    files = run_files(path, growing=growing)
    for file_outcome, file in files:
        if outcome in ("all", file_outcome):
            yield from read_file(path, file_outcome, file, growing=growing)
    if growing and outcome in ("all", "unbatched"):
        history, waiting = read_waiting(path, files)
        for number in waiting:
            yield from journal_rows(path, history, number)


def read_waiting(path: Path, files: Sequence[tuple[StoredOutcome, str]]) -> tuple[RunHistory, list[int]]:
    """The run's history, and the indices of accepted groups that are in the journal but in none of the batch ``files``.

    Raises:
        JournalError: the journal is damaged.
    """
    batches = batches_written(read_info(path)) if (path / JOURNAL).is_dir() else None
    history = RunHistory.read(path / JOURNAL, batches)
    written = sum(outcome == "kept" for outcome, _ in files)
    waiting = [number for batch in history.sealed[written:] for number in batch.groups]
    return history, sorted([*waiting, *history.ready])


def journal_rows(path: Path, history: RunHistory, group_index: int) -> Iterator[Row]:
    """Yield the rows of one accepted group that only the journal has."""
    for sample in history.group_samples(group_index):
        added: dict[str, Any] = {"outcome": "kept", "reason": "in no batch", "batch": None}
        added["digests"] = column_digests(sample.token_column, sample.mask_column, sample.logprob_column)
        yield Row(path, JOURNAL, group_index, "unbatched", {**with_named_tools(sample.to_dict()), **added})


class _Head(msgspec.Struct):
    group_index: int | None = None
    batch: int | None = None


def whole_size(path: Path) -> int:
    """The bytes of a growing file of lines before the append that its writer did not finish; a resume writes it again.

    An append has the lines of one group or batch and is on disk before the next begins. So a line that is not sound
    ends the file, and lines of one group may be behind it. Lines of two groups behind it show that it is damage: then
    the size is that of the file. The last group before the end may be incomplete.
    """
    end: int | None = None
    offset = 0
    behind: list[_Head] = []
    with path.open("rb") as lines:
        for line in lines:
            head = _head(line)
            if head is None:
                end = offset if end is None else end
            elif end is not None and head not in behind[-1:]:
                behind.append(head)
            offset += len(line)
    return offset if end is None or len(behind) > 1 else end


def lines_of(path: Path, *, growing: bool, offset: int = 0, first: int = 1) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, byte offset and bytes of each line; of a growing file up to its :func:`whole_size`."""
    end = whole_size(path) if growing else sys.maxsize
    with path.open("rb") as lines:
        lines.seek(offset)
        for number, line in enumerate(lines, first):
            if offset >= end:
                return
            yield number, offset, line
            offset += len(line)


def _head(line: bytes) -> _Head | None:
    """The group or batch of a sound line."""
    try:
        sound = line.endswith(b"\n") and is_sound(line) is not False
        return msgspec.json.decode(line, type=_Head) if sound else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_file(
    run: Path, outcome: StoredOutcome, file: str, *, growing: bool = False, offset: int = 0, first: int = 1
) -> Iterator[Row]:
    """Yield the rows of one file of a run; of a growing run without an unfinished append (:func:`whole_size`).

    A JSONL file can be read from byte ``offset``, where the line with number ``first`` begins.

    Raises:
        ConfigError: a line is corrupted; the message names file and line.
    """
    if (run / file).is_dir():
        raise ConfigError.of(str(run / file), "a folder", "a file of samples")
    with reading(run / file):
        yield from _rows_of_file(run, outcome, file, growing=growing, offset=offset, first=first)


def _rows_of_file(
    run: Path, outcome: StoredOutcome, file: str, *, growing: bool, offset: int, first: int
) -> Iterator[Row]:
    if file.endswith(".parquet"):
        for number, data in enumerate(parquet.read(run / file), 1):
            yield Row(run, file, number, outcome, with_current_names(data))
        return
    for number, _, line in lines_of(run / file, growing=growing and outcome != "kept", offset=offset, first=first):
        where = f"{run / file}, line {number}"
        if is_sound(line) is False:
            raise ConfigError(f"{where}: corrupted (its checksum does not fit)")
        data = decoded_object(line, where)
        data.pop(CHECKSUM, None)
        yield Row(run, file, number, outcome, with_current_names(data))
