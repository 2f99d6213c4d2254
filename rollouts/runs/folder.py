"""A run on disk: which file holds what, and how it is read back.

    run.json          what was asked, of whom, and how it ended
    batches/          accepted groups, one file a batch: batch-000000.jsonl or .parquet
    dropped.jsonl     groups that the filter rejected
    failed.jsonl      groups lost to a failure
    unbatched.jsonl   accepted groups that were in no batch when the run stopped
    metrics.jsonl     one line a batch
    journal/          everything as it happened: what a run that was stopped or killed goes on from
    recording/        what rollouts were told from outside, where the run was recorded: what it is replayed from

Invariant: a row is a sample's :meth:`Sample.to_dict` and, beside it, ``outcome``, ``reason``, ``batch`` and the
``digests`` of its columns as they were written; float32 logprobs come back bit for bit. Every line, ``run.json`` and
every batch carries a checksum; a line that does not fit its own is not read. This module writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import msgspec

from rollouts.errors import ConfigError
from rollouts.runs import parquet
from rollouts.runs.checksums import CHECKSUM, is_sound
from rollouts.runs.run_journal import RunHistory
from rollouts.training.sample_laws import column_digests
from rollouts.training.types import Sample, with_current_names

__all__ = [
    "CHECKED",
    "JOURNAL",
    "RECORDING",
    "RUN_FILES",
    "Row",
    "StoredOutcome",
    "Which",
    "check_outside",
    "is_growing",
    "journal_rows",
    "read_file",
    "read_info",
    "read_rows",
    "read_waiting",
    "run_files",
]

StoredOutcome: TypeAlias = Literal["kept", "dropped", "failed", "unbatched"]
"""Where a group of a run lies: in a batch, or in one of the other files."""

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
)
"""What makes a folder a run."""

JOURNAL = "journal"
RECORDING = "recording"
"""The folder of a run that has its tapes."""

CHECKED = "checksums"
"""The entry of ``run.json`` that says that every file of the run carries its checksums."""

_PLACES: tuple[StoredOutcome, ...] = ("kept", "dropped", "failed", "unbatched")
_ADDED = ("outcome", "reason", "batch", "digests")


@attrs.frozen
class Row:
    """One stored sample and where it lies. ``data`` is what the file says, not checked."""

    run: Path
    file: str
    """Relative to the run's folder."""
    line: int
    """From 1; of a Parquet file, the row."""
    place: StoredOutcome
    data: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.run / self.file}, line {self.line}"

    def sample(self) -> Sample:
        """The sample itself.

        Raises:
            ConfigError: the row is not a sample; the message names file and line.
        """
        try:
            return Sample.from_dict({key: value for key, value in self.data.items() if key not in _ADDED})
        except (ConfigError, TypeError, ValueError) as error:
            raise ConfigError(f"{self}: not a sample ({error})") from None


def read_rows(path: str | Path, outcome: Which = "kept") -> Iterator[Row]:
    """The stored samples of a run one after another, as they stand in the files, and what only its journal has.

    Raises:
        ConfigError: no run there, an unknown outcome, or a corrupted line; the message names file and line.
    """
    growing = is_growing(path)
    if outcome != "all" and outcome not in _PLACES:
        raise ConfigError.of("outcome", outcome, f'one of {list(_PLACES)}, or "all"')
    return _rows(Path(path), outcome, growing)


def _rows(path: Path, outcome: Which, growing: bool) -> Iterator[Row]:
    files = run_files(path)
    for place, file in files:
        if outcome in ("all", place):
            yield from read_file(path, place, file, growing=growing)
    if growing and outcome in ("all", "unbatched"):
        history, waiting = read_waiting(path, files)
        for number in waiting:
            yield from journal_rows(path, history, number)


def is_growing(path: str | Path) -> bool:
    """Whether the run goes on, or was killed: its files may lag behind its journal."""
    return read_info(path).get("status") == "running"


def read_waiting(path: Path, files: Sequence[tuple[StoredOutcome, str]]) -> tuple[RunHistory, list[int]]:
    """The journal, and the accepted groups that only it has, because none of these files is their batch.

    Raises:
        JournalError: it is damaged.
    """
    history = RunHistory.read(path / JOURNAL)
    written = sum(place == "kept" for place, _ in files)
    waiting = [number for batch in history.sealed[written:] for number in batch.groups]
    return history, sorted([*waiting, *history.ready])


def journal_rows(path: Path, history: RunHistory, group_index: int) -> Iterator[Row]:
    """One of these groups."""
    for sample in history.group_samples(group_index):
        added: dict[str, Any] = {"outcome": "kept", "reason": "in no batch", "batch": None}
        added["digests"] = column_digests(sample.token_column, sample.mask_column, sample.logprob_column)
        yield Row(path, JOURNAL, group_index, "unbatched", {**sample.to_dict(), **added})


def read_info(path: str | Path) -> dict[str, Any]:
    """What ``run.json`` says.

    Raises:
        ConfigError: the folder holds no run, or the file is damaged.
    """
    file = Path(path) / "run.json"
    if not file.is_file():
        raise ConfigError.of("run", str(path), "a folder that a run was written to: it holds run.json")
    return _decoded(file.read_bytes(), str(file))


def check_outside(path: str | Path, option: str) -> None:
    """See that what is written to ``path`` takes the place of nothing that a run stored.

    Raises:
        ConfigError: it is one of a run's files, or lies in one of its folders; the message names ``option``.
    """
    whole = Path(path).resolve()
    for run in whole.parents:
        if whole.relative_to(run).parts[0] in RUN_FILES and (run / "run.json").is_file():
            raise ConfigError.of(option, str(path), f"a place outside the files of the run in {str(run)!r}")


def run_files(path: str | Path) -> list[tuple[StoredOutcome, str]]:
    """The files of samples that are there, as ``(place, name relative to the run)``, batches first and in order."""
    path = Path(path)
    found = sorted((path / "batches").glob("batch-*"))
    files: list[tuple[StoredOutcome, str]] = [
        ("kept", f"batches/{file.name}") for file in found if file.suffix in (".jsonl", ".parquet")
    ]
    return files + [(place, f"{place}.jsonl") for place in _PLACES[1:] if (path / f"{place}.jsonl").is_file()]


def read_file(
    run: Path, place: StoredOutcome, file: str, *, growing: bool = False, offset: int = 0, first: int = 1
) -> Iterator[Row]:
    """The rows of one file of a run; of a growing one, a last line that is being written is left out.

    A file of lines may be read from a byte ``offset`` on, at which the line of number ``first`` begins.

    Raises:
        ConfigError: a corrupted line; the message names file and line.
    """
    if file.endswith(".parquet"):
        for number, data in enumerate(parquet.read(run / file), 1):
            yield Row(run, file, number, place, with_current_names(data))
        return
    with (run / file).open("rb") as lines:
        lines.seek(offset)
        for number, line in enumerate(lines, first):
            if growing and place != "kept" and not line.endswith(b"\n"):
                return
            where = f"{run / file}, line {number}"
            if is_sound(line) is False:
                raise ConfigError(f"{where}: corrupted (its checksum does not fit)")
            data = _decoded(line, where)
            data.pop(CHECKSUM, None)
            yield Row(run, file, number, place, with_current_names(data))


def _decoded(text: bytes, place: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: corrupted, not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise ConfigError.of(place, value, "an object")
    return dict(value)
