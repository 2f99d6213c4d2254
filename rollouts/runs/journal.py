"""The journal: an append-only log of records that survives the death of its writer at any moment.

    journal/segment-000000.journal, segment-000001.journal, …     frames, one after another
    frame = magic 2s · kind u8 · version u8 · length u32 · sequence u64 · payload crc u32 · header crc u32 · payload
    payload: see record_bytes.py

Invariant: when :meth:`Journal.commit` returns, the records are in the operating system's cache and survive this
process; when :meth:`Journal.sync` returns, they are on disk and survive the machine. A record that was incomplete when
the writer died reaches past the end of the file and is cut. Any other change (a flipped bit, a lost segment, a lost
record) raises :class:`JournalError` with file and offset; it never yields a shorter journal.

A machine that dies leaves the bytes that were not synced in any state: missing, zeros, junk, or a hole with intact
records behind it, because the kernel writes pages in any order. A reader that knows how many batches were handed out
can tell this torn tail from damage. A batch is handed out after the sync behind its seal, so the journal up to that
seal is on disk, and so is every segment but the last. There are three cases for a record whose checksum does not fit:

1. It is in an earlier segment, or before the seal of a batch that was handed out: an error. A seal behind the damage
   shows that the batches before it were handed out.
2. It is behind, and nothing intact follows: the tail is cut there.
3. It is behind, and intact records follow: the tail is cut there, too. Every prefix of a run's journal is a past state
   of the run, but records without the one before them are not: a seal without its group, a reply without its turn. Work
   that is cut was not handed out, and is done again.

Lengths are not trusted in the search for records behind the damage: a record counts if both of its checksums fit.

Columns take 9 bytes a token. A commit writes up to 1 MiB on the event loop and more in a thread; only threads wait for
the disk, once a batch. Except for seals, this module does not know what records mean.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
import attrs
import msgspec

from rollouts.base.durable import sync
from rollouts.base.storable import to_msgpack
from rollouts.errors import ConfigError, JournalError
from rollouts.runs.locks import take_lock
from rollouts.runs.record_bytes import LENGTH, Columns, packed, unpacked

__all__ = ["LOCK", "Columns", "Entry", "Journal", "JournalReader", "Offset", "TornTail", "read_entry", "read_journal"]

LOCK = "lock"
"""The file in a journal's folder that its writer locks."""

_HEADER = struct.Struct("<2sBBIQII")
_SIGNED = _HEADER.size - 4
_MAGIC, _VERSION = b"rJ", 1
_SEGMENT_BYTES = 64 << 20
_ON_THE_LOOP = 1 << 20
"""Most bytes that a commit writes on the event loop; more are written in a thread."""
_KINDS = ("segment", "run", "taken", "turn", "attempt", "sample", "group", "sealed", "event")
"""A kind is stored as its index here: append only."""
_BEGINNING = re.compile(rb"rJ.\x01", re.DOTALL)
"""The first bytes of any record."""


@attrs.frozen(order=True)
class Offset:
    """Position of a record."""

    segment: int
    offset: int
    """Bytes from the start of the segment."""


@attrs.frozen(eq=False)
class Entry:
    """One record as read."""

    kind: str
    sequence: int
    fields: dict[str, Any]
    columns: Columns | None
    offset: Offset


@attrs.frozen
class TornTail:
    """The end of a journal that its writer or its machine did not finish; opening the journal cuts it."""

    file: str
    """The segment."""
    offset: int
    """Bytes from the start of the segment to the first record that is not whole."""
    size: int
    """Bytes from there to the end."""
    records: int
    """Whole records in them."""
    reason: str

    def __str__(self) -> str:
        whole = f", {self.records} whole records in them" if self.records else ""
        return f"{self.file}, offset {self.offset}: {self.size} bytes ({self.reason}{whole})"


# -- writing ----------------------------------------------------------------------------------------------------------


class Journal:
    """The writer of a journal; creates the folder or continues the journal in it.

    Only one process at a time may open it. Opening cuts a torn tail.

    Args:
        path: the folder.
        segment_bytes: size from which the next flush starts a new segment.
        batches: as for :class:`JournalReader`.

    Attributes:
        torn: the tail that was cut.

    Raises:
        ConfigError: another process writes to it.
        JournalError: it is damaged, or cannot be opened.
    """

    def __init__(self, path: str | Path, *, segment_bytes: int = _SEGMENT_BYTES, batches: int | None = None) -> None:
        self.path = Path(path)
        self._segment_bytes = segment_bytes
        self._queue: list[tuple[int, bytes, bytes]] = []
        self._waiting = 0
        self._appending = threading.Lock()
        self._writing = threading.Lock()
        self.syncs = 0
        """Number of fdatasync calls."""
        self._error: JournalError | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
            try:
                end = _recovered(self.path, batches)
                self.torn = end.torn
                self._sequence = end.sequence
                self._open(end.segment)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise JournalError(f"{self.path}: the journal cannot be opened: {error}") from error

    def __repr__(self) -> str:
        return f"<Journal {self.path}: {self._sequence} records, {len(self._queue)} not written yet>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, kind: str, fields: Mapping[str, Any], columns: Columns | None = None) -> None:
        """Queue a copy of a record; the next :meth:`commit` writes it.

        Raises:
            JournalError: an earlier record could not be written.
        """
        self._raise_if_broken()
        record = (_KINDS.index(kind), *packed(fields, columns))
        with self._appending:
            self._queue.append(record)
            self._waiting += len(record[1]) + len(record[2])

    async def commit(self) -> None:
        """Write every record appended so far; they then survive this process.

        Raises:
            JournalError: the write failed; then no record since the last commit is stored.
        """
        waits = self._end >= self._segment_bytes or self._writing.locked()  # for the disk: a new segment, or a thread
        if self._waiting <= _ON_THE_LOOP and not waits:
            self.flush()
            return
        with anyio.CancelScope(shield=True):  # a write that has begun cannot be cancelled
            await anyio.to_thread.run_sync(self.flush)

    async def sync(self) -> None:
        """Commit, and wait for the disk; the records then survive the machine.

        Raises:
            JournalError: as :meth:`commit`; or the disk failed, and what it stored is unknown.
        """
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._sync)

    def flush(self) -> None:
        """Write the queued records in this thread.

        Raises:
            JournalError: the disk is full, read-only, or gone. The journal is cut back to the last commit and accepts
                no further records.
        """
        with self._writing:
            self._raise_if_broken()
            with self._appending:
                queue, self._queue, self._waiting = self._queue, [], 0
            if queue:
                with self._breaking():
                    if self._end >= self._segment_bytes:
                        self._rotate()
                    data = self._framed(queue)
                    try:
                        _write_all(self._file, data)
                    except OSError:
                        _cut_back(self._file, self._end)
                        raise
                    self._end += len(data)

    def _sync(self) -> None:
        self.flush()
        with self._breaking():
            with self._writing:  # released before the disk answers, so that commits do not wait for it
                self._raise_if_broken()
                file = os.dup(self._file.fileno())
            try:
                self._to_disk(file)
            finally:
                os.close(file)

    def _to_disk(self, file: int) -> None:
        os.fdatasync(file)
        self.syncs += 1

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Turn an error into the JournalError that every later call raises, too: queued records may be lost."""
        try:
            yield
        except (OSError, MemoryError, struct.error) as error:
            self._error = JournalError(f"{self._name()}: the journal cannot be written: {error}")
            raise self._error from error

    def close(self) -> None:
        """Sync the remaining records and release the lock."""
        try:
            if self._error is None:
                self._sync()
        finally:
            self._file.close()
            os.close(self._lock)

    def _framed(self, records: list[tuple[int, bytes, bytes]]) -> bytes:
        parts: list[bytes] = []
        for kind, fields, buffers in records:
            parts += _frame(kind, self._sequence, fields, buffers)
            self._sequence += 1
        return b"".join(parts)

    def _rotate(self) -> None:
        self._to_disk(self._file.fileno())
        self._file.close()
        self._open(self._segment + 1)

    def _open(self, number: int) -> None:
        """Open a segment to append to it; the first record of a new one contains its number."""
        self._segment = number
        self._file: io.FileIO = self._name().open("ab", buffering=0)
        if self._file.tell() == 0:
            _write_all(self._file, b"".join(_frame(0, self._sequence, to_msgpack({"segment": number}), b"")))
            self._sequence += 1
            sync(self.path)  # stores the file's name
        self._end = self._file.tell()

    def _name(self) -> Path:
        return _segment_path(self.path, self._segment)


def _frame(kind: int, sequence: int, fields: bytes, buffers: bytes) -> tuple[bytes, ...]:
    """The parts of a record, in the order in which they are written."""
    length = LENGTH.size + len(fields) + len(buffers)
    size = LENGTH.pack(len(fields))
    crc = zlib.crc32(buffers, zlib.crc32(fields, zlib.crc32(size)))
    header = _HEADER.pack(_MAGIC, kind, _VERSION, length, sequence, crc, 0)[:_SIGNED]
    return header, LENGTH.pack(zlib.crc32(header)), size, fields, buffers


def _locked(path: Path) -> int:
    lock = take_lock(path / LOCK)
    if lock is None:
        raise ConfigError.of("journal", str(path), "a journal that no other process is writing to")
    return lock


def _write_all(file: io.FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _cut_back(file: io.FileIO, end: int) -> None:
    with contextlib.suppress(OSError):  # the incomplete record stays, and the next Journal cuts it
        os.ftruncate(file.fileno(), end)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_journal(path: str | Path) -> Iterator[Entry]:
    """Yield the records of a journal in order, without an incomplete last one; raises as :class:`JournalReader`."""
    yield from JournalReader(path)


def read_entry(path: str | Path, offset: Offset) -> Entry:
    """Read and check the record at ``offset``.

    Raises:
        JournalError: the record is damaged or incomplete.
    """
    name = _segment_path(Path(path), offset.segment)
    with name.open("rb") as file:
        file.seek(offset.offset)
        header = file.read(_HEADER.size)
        length = _HEADER.unpack(header)[3] if len(header) == _HEADER.size else 0
        data = header + file.read(length)
    parsed = _parse(data, 0, name, offset.offset)
    if parsed is None:
        raise JournalError(f"{name}, offset {offset.offset}: the record ends early")
    return attrs.evolve(parsed[0], offset=offset)


class JournalReader:
    """Iterator over the records of a journal in order; one segment at a time is in memory.

    Args:
        path: the folder.
        batches: number of batches that were handed out; a torn tail behind their seals ends the journal. Without it,
            only an incomplete last record does, and zeros to the end of the file.

    Attributes:
        segment, end, sequence: afterwards, the position behind the last record.
        torn: afterwards, the tail that was not read.

    Raises:
        JournalError: on iteration: a record is damaged or missing; the message names file and offset.
    """

    def __init__(self, path: str | Path, batches: int | None = None) -> None:
        self.path = Path(path)
        self.segment = 0
        self.end = 0
        self.sequence = 0
        self.torn: TornTail | None = None
        self._batches = batches
        self._sealed = 0

    def __repr__(self) -> str:
        return f"<JournalReader of {self.path}: segment {self.segment}, offset {self.end}>"

    def __iter__(self) -> Iterator[Entry]:
        names = sorted(self.path.glob("segment-*.journal"))
        for number, name in enumerate(names):
            if name != _segment_path(self.path, number):
                raise JournalError(f"{_segment_path(self.path, number)}, offset 0: the segment is missing")
            if not name.is_file():
                raise JournalError(f"{name}, offset 0: not a file")
            self.segment, self.end = number, 0
            data = name.read_bytes()
            yield from self._records(data, name, last=number + 1 == len(names))
        if self._sealed < (self._batches or 0):
            name = _segment_path(self.path, self.segment)
            missing = f"the journal ends before the seal of batch {(self._batches or 0) - 1}, which was handed out"
            raise JournalError(f"{name}, offset {self.end}: {missing}")

    def _records(self, data: bytes, name: Path, *, last: bool) -> Iterator[Entry]:
        """Yield the records of one segment."""
        while self.end < len(data):
            try:
                parsed = _parse(data, self.end, name, self.end)
            except _Damaged as damage:
                if not last or self._batches is None:
                    raise
                self._tear(data, name, damage)
                return
            if parsed is None:
                if not last:
                    raise JournalError(f"{name}, offset {self.end}: the segment ends inside a record")
                self.torn = TornTail(name.name, self.end, len(data) - self.end, 0, "the last record is incomplete")
                return
            entry, stop = parsed
            entry = attrs.evolve(entry, offset=Offset(self.segment, self.end))
            self._check(entry, name)
            first = self.end == 0
            self.end, self.sequence = stop, self.sequence + 1
            self._sealed += entry.kind == "sealed"
            if not first:
                yield entry
        if not data and not last:
            raise JournalError(f"{name}, offset 0: the segment is empty")

    def _check(self, entry: Entry, name: Path) -> None:
        """Check that a record is the next one of the segment."""
        first = self.end == 0
        if entry.sequence != self.sequence or first != (entry.kind == "segment"):
            raise JournalError(
                f"{name}, offset {self.end}: got record {entry.sequence} of kind {entry.kind}; expected "
                f"record {self.sequence}{', which begins the segment' if first else ''}"
            )
        if first and entry.fields.get("segment") != self.segment:
            raise JournalError(f"{name}, offset 0: got segment {entry.fields.get('segment')} under this name")

    def _tear(self, data: bytes, name: Path, damage: _Damaged) -> None:
        """End the journal before a damaged record, unless a batch that was handed out is sealed behind it."""
        behind = list(_whole_records(data, self.end + 1, name, self.sequence))
        seals = [entry.fields.get("batch") for entry in behind if entry.kind == "sealed"]
        handed_out = max([self._batches or 0, *(batch for batch in seals if isinstance(batch, int))])
        if self._sealed < handed_out:
            raise damage
        self.torn = TornTail(name.name, self.end, len(data) - self.end, len(behind), damage.reason)


def _whole_records(data: bytes, start: int, name: Path, sequence: int) -> Iterator[Entry]:
    """Yield the records at or behind ``start`` with a higher number than ``sequence`` whose checksums fit."""
    while (found := _BEGINNING.search(data, start)) is not None:
        start = found.start() + 1
        try:
            parsed = _parse(data, found.start(), name, found.start())
        except JournalError:
            continue
        if parsed is not None and parsed[0].sequence > sequence:
            entry, start = parsed
            yield entry


def _recovered(path: Path, batches: int | None) -> JournalReader:
    """Read all records, cut a torn tail, and return the reader at the position behind the last record."""
    reader = JournalReader(path, batches)
    for _ in reader:
        pass
    if reader.torn is not None:
        with _segment_path(path, reader.segment).open("r+b") as file:
            file.truncate(reader.end)
            os.fsync(file.fileno())
    return reader


class _Damaged(JournalError):
    """A record whose checksums do not fit."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: damaged ({reason})")
        self.reason = reason


def _parse(data: bytes, start: int, name: Path, offset: int) -> tuple[Entry, int] | None:
    """Parse the record at ``start``; returns it and its end, or ``None`` if the data end inside it.

    Raises:
        JournalError: the record is damaged.
    """
    left = len(data) - start
    if left < _HEADER.size:
        return None
    magic, kind, version, length, sequence, crc, header_crc = _HEADER.unpack_from(data, start)
    if zlib.crc32(data[start : start + _SIGNED]) != header_crc:
        if not any(memoryview(data)[start:]):
            return None  # the file was extended and never filled
        raise _Damaged(f"{name}, offset {offset}", "the header's checksum does not fit")
    if (magic, version) != (_MAGIC, _VERSION) or kind >= len(_KINDS):
        raise JournalError(f"{name}, offset {offset}: a record of version {version}, kind {kind}; this is version 1")
    body, stop = start + _HEADER.size, start + _HEADER.size + length
    if stop > len(data):
        return None
    payload = memoryview(data)[body:stop]
    if zlib.crc32(payload) != crc:
        raise _Damaged(f"{name}, offset {offset}", "the record's checksum does not fit")
    try:
        fields, columns = unpacked(payload)
    except (struct.error, msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise JournalError(
            f"{name}, offset {offset}: the checksums fit, but the record cannot be decoded: {error}"
        ) from None
    return Entry(_KINDS[kind], sequence, fields, columns, Offset(0, offset)), stop


def _segment_path(path: Path, number: int) -> Path:
    return path / f"segment-{number:06d}.journal"
