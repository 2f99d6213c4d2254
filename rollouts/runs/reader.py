"""Lazy reader of the samples of a stored run.

Invariant: memory contains one sample or one group at a time, and the offset of each group. Samples are read from disk
at each access; the list of groups is read once, at first use. A run may be active, killed, or finished; groups that
only the journal has are read from there. This module writes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import attrs
import msgspec

from rollouts.errors import ConfigError
from rollouts.runs import parquet
from rollouts.runs.folder import Row, journal_rows, lines_of, read_file, read_rows, read_waiting
from rollouts.runs.info import is_growing, read_info
from rollouts.runs.layout import JOURNAL, StoredOutcome, Which, run_files
from rollouts.runs.run_history import RunHistory
from rollouts.training.types import Sample

__all__ = ["StoredSamples", "load_run"]


@attrs.frozen
class _Span:
    """Consecutive rows of one group in one file."""

    outcome: StoredOutcome
    file: str
    group_index: int
    first: int
    """Number of the first row, from 0."""
    offset: int
    """Byte offset of the first row in a JSONL file; else 0."""
    rows: int


class _Head(msgspec.Struct):
    group_index: int


class StoredSamples(Sequence[Sample]):
    """The samples of a run in the order of its files: ``for sample in run``, ``run[5]``, ``run[-8:]``, ``len(run)``.

    Every access reads from disk; ``list(run)`` loads all samples into memory.

    Args:
        path: the run's folder.
        outcome: ``"kept"`` (the batches, in order), ``"dropped"``, ``"failed"``, ``"unbatched"`` or ``"all"``.

    Raises:
        ConfigError: ``path`` is not a run, or the outcome is unknown. Access to a corrupted line raises it, with file
            and line.
    """

    def __init__(self, path: str | Path, outcome: Which = "kept") -> None:
        self.path = Path(path)
        self.outcome = outcome
        self.info = read_info(path)
        """The content of ``run.json``: recipe, config, versions, status, accounting."""
        read_rows(path, outcome)  # checks the arguments now, not at the first access
        self._known: list[_Span] | None = None
        self._history: RunHistory | None = None
        self._last: tuple[_Span, list[Row]] | None = None

    def __repr__(self) -> str:
        about = ", ".join(str(self.info[name]) for name in ("recipe", "status") if self.info.get(name))
        known = "not counted yet"
        if self._known is not None:
            known = f"{len(self)} samples in {len(self.group_indices)} groups"
        return f"<StoredSamples {self.path} ({about}): {self.outcome}, {known}>"

    def __iter__(self) -> Iterator[Sample]:
        return (row.sample() for row in read_rows(self.path, self.outcome))

    def __len__(self) -> int:
        return sum(span.rows for span in self._spans())

    @overload
    def __getitem__(self, key: int) -> Sample: ...
    @overload
    def __getitem__(self, key: slice) -> list[Sample]: ...
    def __getitem__(self, key: int | slice) -> Sample | list[Sample]:
        if isinstance(key, slice):
            return [self[number] for number in range(*key.indices(len(self)))]
        left = key if key >= 0 else key + len(self)
        if left >= 0:
            for span in self._spans():
                if left < span.rows:
                    return self._read(span)[left].sample()
                left -= span.rows
        raise IndexError(f"{self!r} has no sample {key}")

    @property
    def group_indices(self) -> list[int]:
        """The group indices in file order."""
        return list(dict.fromkeys(span.group_index for span in self._spans()))

    def group(self, group_index: int) -> list[Sample]:
        """The samples of one group.

        Raises:
            ConfigError: there is no such group.
        """
        spans = [span for span in self._spans() if span.group_index == group_index]
        if not spans:
            raise ConfigError.of("group", group_index, f"a group of {self!r}")
        return [row.sample() for span in spans for row in self._read(span)]

    def groups(self) -> Iterator[list[Sample]]:
        """Yield the samples of each group, in file order."""
        for _, samples in itertools.groupby(self, lambda sample: sample.group_index):
            yield list(samples)

    def _spans(self) -> list[_Span]:
        """The span of each group, found once by one pass through the files."""
        if self._known is None:
            self._known = list(self._find_spans())
        return self._known

    def _find_spans(self) -> Iterator[_Span]:
        growing = is_growing(self.path)
        files = run_files(self.path, growing=growing)
        for outcome, file in files:
            if self.outcome in ("all", outcome):
                yield from _spans_of(self.path, outcome, file, growing=growing)
        if growing and self.outcome in ("all", "unbatched"):
            self._history, waiting = read_waiting(self.path, files)
            for number in waiting:
                rows = sum(self._history.rollouts[index].whole for index in self._history.settled[number][2])
                yield _Span("unbatched", JOURNAL, number, 0, 0, rows)

    def _read(self, span: _Span) -> list[Row]:
        if self._last is not None and self._last[0] is span:
            return self._last[1]
        if span.file == JOURNAL:
            assert self._history is not None, "_find_spans read the journal"
            rows = list(journal_rows(self.path, self._history, span.group_index))
        elif span.file.endswith(".parquet"):
            stored = parquet.read_some(self.path / span.file, span.first, span.rows)
            first = span.first + 1
            rows = [Row(self.path, span.file, number, span.outcome, data) for number, data in enumerate(stored, first)]
        else:
            lines = read_file(self.path, span.outcome, span.file, offset=span.offset, first=span.first + 1)
            rows = list(itertools.islice(lines, span.rows))
        self._last = (span, rows)
        return rows


def load_run(path: str | Path, outcome: Which = "kept") -> StoredSamples:
    """Open the samples of a stored run; see :class:`StoredSamples`."""
    return StoredSamples(path, outcome)


def _spans_of(run: Path, outcome: StoredOutcome, file: str, *, growing: bool) -> Iterator[_Span]:
    """Yield the span of each group in a file."""
    growing = growing and outcome != "kept"  # a batch appears whole
    heads = _heads_of_parquet(run / file) if file.endswith(".parquet") else _heads_of_lines(run / file, growing=growing)
    first = 0
    for number, members in itertools.groupby(heads, lambda head: head[0]):
        offsets = [offset for _, offset in members]
        yield _Span(outcome, file, number, first, offsets[0], len(offsets))
        first += len(offsets)


def _heads_of_parquet(path: Path) -> Iterator[tuple[int, int]]:
    return ((group_index, 0) for group_index in parquet.group_indices(path))


def _heads_of_lines(path: Path, *, growing: bool) -> Iterator[tuple[int, int]]:
    """Yield the group index and byte offset of each line."""
    for number, offset, line in lines_of(path, growing=growing):
        try:
            head = msgspec.json.decode(line, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: corrupted ({error})") from None
        yield head.group_index, offset
