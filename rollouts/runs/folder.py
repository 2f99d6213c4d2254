"""The layout of a run's folder, and the readers of its files.

    run.json          recipe, config, endpoint, versions; status and accounting
    batches/          accepted groups, one file a batch: batch-000000.jsonl or .parquet
    dropped.jsonl     groups that the filter rejected
    failed.jsonl      groups lost to a failure
    unbatched.jsonl   accepted groups that were in no batch when the run stopped
    metrics.jsonl     one line a batch
    journal/          the append-only log from which a stopped or killed run resumes
    recording/        server replies and environment results of a run with --record, for replay
    images/           the images that samples, turns and recordings name, <sha256>.png, each once
    leases.log        acknowledgements of a run whose groups are leased
    tools/            the tools that samples name, <sha256>.json, each list of schemas once

Invariant: a row is a sample's :meth:`Sample.to_dict` plus ``outcome``, ``reason``, ``batch`` and the ``digests`` of its
columns; float32 logprobs are read back bit for bit. Every line, ``run.json`` and every batch has a checksum; a line
that does not match its checksum is refused. This module writes nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import msgspec

from rollouts.errors import ConfigError
from rollouts.runs import parquet
from rollouts.runs.checksums import CHECKSUM, is_sound
from rollouts.runs.images import IMAGES, ImageFolder
from rollouts.runs.reading import check_file, reading
from rollouts.runs.run_journal import RunHistory
from rollouts.runs.tools import TOOLS, ToolFolder, named
from rollouts.training.sample_fields import with_current_names
from rollouts.training.sample_laws import column_digests
from rollouts.training.types import Sample

__all__ = [
    "CHECKED",
    "JOURNAL",
    "METRICS",
    "METRICS_CRC",
    "RECORDING",
    "RUN_FILES",
    "Row",
    "StoredOutcome",
    "Which",
    "batch_name",
    "batches_written",
    "check_files",
    "check_output",
    "check_outside",
    "is_growing",
    "journal_rows",
    "note_of_calls",
    "read_file",
    "read_info",
    "read_rows",
    "read_waiting",
    "run_files",
    "whole_size",
]

StoredOutcome: TypeAlias = Literal["kept", "dropped", "failed", "unbatched"]
"""Which files contain a group: ``kept`` the batches, else the file of that name."""

Which: TypeAlias = StoredOutcome | Literal["all"]

RUN_FILES = (
    "run.json",
    "batches",
    "dropped.jsonl",
    "failed.jsonl",
    "unbatched.jsonl",
    "metrics.jsonl",
    "journal",
    "recording",
    "leases.log",
)
"""Files and folders of a run but its images; any of them makes a folder a run."""

JOURNAL = "journal"
METRICS = "metrics.jsonl"
METRICS_CRC = "metrics_crc32"
"""The entry of ``run.json`` with the CRC-32 of the lines of ``metrics.jsonl``, one for each batch."""
RECORDING = "recording"
"""The folder of a recorded run's tapes."""

CHECKED = "checksums"
"""The entry of ``run.json`` that is true if every file of the run has checksums."""

_MAX_INFO = 1 << 24
"""Bytes of ``run.json``: it describes the run, and lists its resumptions."""
_OUTCOMES: tuple[StoredOutcome, ...] = ("kept", "dropped", "failed", "unbatched")
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
    if outcome != "all" and outcome not in _OUTCOMES:
        raise ConfigError.of("outcome", outcome, f'one of {list(_OUTCOMES)}, or "all"')
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


def is_growing(path: str | Path) -> bool:
    """Whether the run is active or was killed; its files may then lag behind its journal."""
    return read_info(path).get("status") == "running"


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
        yield Row(path, JOURNAL, group_index, "unbatched", {**named(sample.to_dict()), **added})


def note_of_calls(info: Mapping[str, Any]) -> str | None:
    """A sentence about a run whose tool calls were not checked against its chat template; ``None`` for any other."""
    template = (info.get("settings") or {}).get("template") or {}
    if template.get("calls") != "unchecked":
        return None
    return f'tool calls: calls="unchecked", dialect {template.get("dialect")!r} read the replies'


def read_info(path: str | Path) -> dict[str, Any]:
    """Read ``run.json``.

    Raises:
        ConfigError: the folder contains no run, or the file is damaged.
    """
    file = Path(path) / "run.json"
    if not file.is_file():
        raise ConfigError.of("run", str(path), "the folder of a run, with run.json")
    check_file(file)
    if file.stat().st_size > _MAX_INFO:
        raise ConfigError.of("run", f"{file} of {file.stat().st_size} bytes", f"at most {_MAX_INFO}")
    with reading(file):
        return _decoded(file.read_bytes(), str(file))


def batches_written(info: Mapping[str, Any]) -> int:
    """The number of batches that ``run.json`` counts; each was sealed in the journal, on disk, before it had a file."""
    batches = info.get("batches", 0)
    return batches if isinstance(batches, int) and batches >= 0 else 0


def check_outside(path: str | Path, option: str) -> None:
    """Check that writing to ``path`` overwrites no file of a run.

    Raises:
        ConfigError: it is a file of a run, or lies in one of its folders; the message names ``option``.
    """
    whole = Path(path).resolve()
    for run in whole.parents:
        if whole.relative_to(run).parts[0] in (*RUN_FILES, IMAGES, TOOLS) and (run / "run.json").is_file():
            raise ConfigError.of(option, str(path), f"a place outside the files of the run in {str(run)!r}")


def check_output(path: str | Path, option: str, *, overwrite: bool) -> None:
    """Check that a file may be written to ``path``.

    Raises:
        ConfigError: it lies among the files of a run, is a folder, or exists and ``overwrite`` is false; the message
            names ``option``.
    """
    check_outside(path, option)
    if Path(path).is_dir():
        raise ConfigError.of(option, str(path), "a file; a folder is there")
    if Path(path).exists() and not overwrite:
        raise ConfigError.of(option, str(path), "a file that does not exist. --overwrite replaces it")


def batch_name(number: int) -> str:
    """The name of a batch's file, without its suffix."""
    return f"batch-{number:06d}"


def run_files(path: str | Path, *, growing: bool = False) -> list[tuple[StoredOutcome, str]]:
    """The existing sample files as ``(outcome, name relative to the run)``; batches first, in order.

    Without ``unbatched.jsonl`` if the run is growing: it died at its end, and the journal has the groups.

    Raises:
        ConfigError: as :func:`check_files`.
    """
    path = Path(path)
    check_files(path)
    batches = sorted((path / "batches").glob("batch-*"))
    files: list[tuple[StoredOutcome, str]] = [
        ("kept", f"batches/{file.name}") for file in batches if file.suffix in (".jsonl", ".parquet")
    ]
    appended = _OUTCOMES[1:3] if growing else _OUTCOMES[1:]
    return files + [(name, f"{name}.jsonl") for name in appended if (path / f"{name}.jsonl").exists()]


def check_files(path: Path) -> None:
    """Check that every file of a run but its images may be opened; a folder in the place of a file is found later.

    Raises:
        ConfigError: one of them is a FIFO, a socket, a device or a sparse file, or a link leads nowhere.
    """
    with reading(path):
        names = ("run.json", METRICS, *(f"{name}.jsonl" for name in _OUTCOMES[1:]))
        folders = (path / name for name in ("batches", JOURNAL, RECORDING))
        files = [*(path / name for name in names), *(file for folder in folders for file in folder.glob("[!.]*"))]
        for file in files:
            if os.path.lexists(file) and not file.is_dir():
                check_file(file)


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
    end = whole_size(run / file) if growing and outcome != "kept" else sys.maxsize
    with (run / file).open("rb") as lines:
        lines.seek(offset)
        for number, line in enumerate(lines, first):
            if offset >= end:
                return
            offset += len(line)
            where = f"{run / file}, line {number}"
            if is_sound(line) is False:
                raise ConfigError(f"{where}: corrupted (its checksum does not fit)")
            data = _decoded(line, where)
            data.pop(CHECKSUM, None)
            yield Row(run, file, number, outcome, with_current_names(data))


def _decoded(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: corrupted, not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise ConfigError.of(where, value, "an object")
    return dict(value)
