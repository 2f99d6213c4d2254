"""The journal: exactly the committed records are read, whatever happens to the file."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollouts.errors import ConfigError, JournalError
from rollouts.runs.journal import Columns, Entry, Journal, TornTail, read_entry, read_journal


def columns(length: int, *, logprobs: bool = True) -> Columns:
    rng = np.random.default_rng(length)
    numbers = -rng.exponential(size=length).astype(np.float32)
    ids = rng.integers(0, 2**31, length).astype(np.int32)
    return Columns(ids, rng.random(length) < 0.5, numbers if logprobs else None)


def written(path: Path, records: int = 5, **options: Any) -> list[Entry]:
    with Journal(path, **options) as journal:
        for number in range(records):
            journal.append("sample", {"number": number, "text": "é" * number}, columns(3 * number))
            journal.flush()
    return list(read_journal(path))


def last_segment(path: Path) -> Path:
    return sorted(path.glob("segment-*"))[-1]


def test_what_was_committed_is_read_again_bit_for_bit(tmp_path: Path) -> None:
    """Fields and columns, over several segments, and one record by its offset."""
    found = written(tmp_path, 9, segment_bytes=200)
    assert found[0].sequence == 1, "the record that begins the first segment has number 0"
    assert len(list(tmp_path.glob("segment-*"))) > 2
    assert [entry.fields["number"] for entry in found] == list(range(9))
    for entry in found:
        expected = columns(3 * entry.fields["number"])
        assert entry.columns is not None
        assert entry.columns.to_bytes() == expected.to_bytes()
        again = read_entry(tmp_path, entry.offset)
        assert (again.kind, again.sequence, again.fields) == (entry.kind, entry.sequence, entry.fields)


def test_a_token_costs_nine_bytes(tmp_path: Path) -> None:
    """Columns are stored as raw arrays."""
    with Journal(tmp_path) as journal:
        journal.append("sample", {}, columns(100_000))
        journal.flush()
        assert 900_000 < last_segment(tmp_path).stat().st_size < 900_200


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([{"bytes like the head of a timestamp": b"\xc7\x0c\xff"}])
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=5), st.none() | st.text(max_size=9) | st.integers(-(2**63), 2**63) | st.binary()
        ),
        max_size=6,
    )
)
def test_any_plain_fields_come_back(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]) -> None:
    """Any value in a user's metadata."""
    path = tmp_path_factory.mktemp("journal")
    records = [{key: value for key, value in record.items() if key != "columns"} for record in records]
    with Journal(path) as journal:
        for record in records:
            journal.append("turn", record)
    assert [entry.fields for entry in read_journal(path)] == records


def test_a_journal_cut_at_any_byte_of_its_last_three_records_gives_the_earlier_ones_and_goes_on(
    tmp_path: Path,
) -> None:
    """An incomplete last record is cut and overwritten; its place and size are said."""
    entries = written(tmp_path / "whole")
    segment = last_segment(tmp_path / "whole")
    data = segment.read_bytes()
    ends = [entry.offset.offset for entry in entries[1:]] + [len(data)]
    for size in range(ends[1], len(data)):
        path = tmp_path / "cut"
        path.mkdir(exist_ok=True)
        (path / segment.name).write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        assert [entry.fields["number"] for entry in read_journal(path)] == list(range(whole)), size
        with Journal(path) as journal:
            start = ends[whole - 1]
            torn = TornTail(segment.name, start, size - start, 0, "the last record is incomplete")
            assert journal.torn == (None if size == start else torn)
            journal.append("group", {"number": "next"})
        assert [entry.fields["number"] for entry in read_journal(path)] == [*range(whole), "next"], size


def test_every_flipped_bit_is_found_and_located(tmp_path: Path) -> None:
    """In headers, lengths, fields, columns and checksums; also in the last record, which is not taken as incomplete."""
    entries = written(tmp_path, 4)
    segment = last_segment(tmp_path)
    data = segment.read_bytes()
    starts = [0, *(entry.offset.offset for entry in entries)]
    for position in range(len(data)):
        offset = max(start for start in starts if start <= position)
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            segment.write_bytes(damaged)
            with pytest.raises(JournalError, match=f"{segment.name}, offset {offset}: "):
                list(read_journal(tmp_path))


def test_a_damaged_journal_is_not_written_to(tmp_path: Path) -> None:
    """Opening it raises with the location, and changes nothing."""
    written(tmp_path)
    segment = last_segment(tmp_path)
    damaged = bytearray(segment.read_bytes())
    damaged[40] ^= 1
    segment.write_bytes(damaged)
    with pytest.raises(JournalError, match="offset"):
        Journal(tmp_path)
    assert segment.read_bytes() == damaged


def test_a_lost_segment_and_a_lost_record_are_found(tmp_path: Path) -> None:
    """A gap in the numbers raises; it is not a shorter journal."""
    entries = written(tmp_path, 9, segment_bytes=200)
    first, second, *_ = sorted(tmp_path.glob("segment-*"))
    data = second.read_bytes()
    second.unlink()
    with pytest.raises(JournalError, match=r"segment-000001.journal, offset 0: the segment is missing"):
        list(read_journal(tmp_path))
    second.write_bytes(data)
    records = [entry for entry in entries if entry.offset.segment == 0]
    first.write_bytes(first.read_bytes()[: records[-1].offset.offset])
    with pytest.raises(JournalError, match=f"got record {records[-1].sequence + 1} .* expected record"):
        list(read_journal(tmp_path))


def test_a_file_that_was_lengthened_and_never_filled_is_a_torn_tail(tmp_path: Path) -> None:
    """Zeros, which some file systems leave after a power cut."""
    written(tmp_path, 2)
    segment = last_segment(tmp_path)
    segment.write_bytes(segment.read_bytes() + bytes(100))
    assert len(list(read_journal(tmp_path))) == 2


def sealing(path: Path, **options: Any) -> list[Entry]:
    """A journal with a seal after its third and its sixth record, and three records behind them."""
    with Journal(path, **options) as journal:
        for number in range(9):
            journal.append("sample", {"number": number}, columns(3 + number))
            if number in (2, 5):
                journal.append("sealed", {"batch": number // 3})
            journal.flush()
    return list(read_journal(path))


def test_a_tail_that_begins_with_its_segment_is_cut_whole(tmp_path: Path) -> None:
    """The last segment is empty then, and the next record follows those of the segment before."""
    entries = sealing(tmp_path, segment_bytes=400)
    segment = last_segment(tmp_path)
    inside = sum(entry.offset.segment == entries[-1].offset.segment for entry in entries)
    assert "sealed" not in {entry.kind for entry in entries[-inside:]}
    data = segment.read_bytes()
    segment.write_bytes(bytes(30) + data[30:])
    with Journal(tmp_path, batches=2) as journal:
        assert journal.torn is not None
        assert (journal.torn.file, journal.torn.offset, journal.torn.records) == (segment.name, 0, inside)
        journal.append("group", {"number": "next"})
    kept = [entry.fields for entry in entries[:-inside]]
    assert [entry.fields for entry in read_journal(tmp_path)] == [*kept, {"number": "next"}]


def test_damage_in_an_earlier_segment_is_no_torn_tail(tmp_path: Path) -> None:
    """It was synced before the next segment had a name."""
    entries = sealing(tmp_path, segment_bytes=400)
    earlier = sorted(tmp_path.glob("segment-*"))[-2]
    behind = next(entry for entry in entries if entry.offset.segment == entries[-1].offset.segment - 1)
    data = bytearray(earlier.read_bytes())
    data[behind.offset.offset + 30] ^= 1
    earlier.write_bytes(data)
    with pytest.raises(JournalError, match=f"{earlier.name}, offset {behind.offset.offset}: damaged"):
        Journal(tmp_path, batches=0)


def test_a_damaged_seal_of_a_batch_that_was_handed_out_is_no_torn_tail(tmp_path: Path) -> None:
    """Also where no seal follows it; the error has the reason."""
    seal = [entry for entry in sealing(tmp_path) if entry.kind == "sealed"][-1]
    segment = last_segment(tmp_path)
    data = bytearray(segment.read_bytes())
    data[seal.offset.offset + 30] ^= 1
    segment.write_bytes(data)
    with pytest.raises(JournalError, match=f"offset {seal.offset.offset}: damaged"):
        Journal(tmp_path, batches=2)


def test_a_journal_without_the_seal_of_a_batch_that_was_handed_out_is_damaged(tmp_path: Path) -> None:
    """Also an empty folder: the error has the place where the journal ends."""
    missing = "segment-000000.journal, offset {}: the journal ends before the seal of batch {}, which was handed out"
    with pytest.raises(JournalError, match=missing.format(0, 0)):
        Journal(tmp_path, batches=1)
    sealing(tmp_path)
    with pytest.raises(JournalError, match=missing.format(last_segment(tmp_path).stat().st_size, 2)):
        Journal(tmp_path, batches=3)


def test_a_length_in_junk_hides_no_seal(tmp_path: Path) -> None:
    """The header in the damaged bytes is sound and its length covers the rest of the file, but its payload is not."""
    entries = sealing(tmp_path)
    segment = last_segment(tmp_path)
    data = segment.read_bytes()
    start, stop = (entry.offset.offset for entry in entries[:2])
    for length in (0, 40, len(data) - start - 40, 2**32 - 1):
        signed = struct.pack("<2sBBIQI", b"rJ", 5, 1, length, 999, 0)
        forged = bytes(8) + signed + struct.pack("<I", zlib.crc32(signed))
        segment.write_bytes(data[:start] + forged + bytes(stop - start - len(forged)) + data[stop:])
        with pytest.raises(JournalError, match=f"offset {start}: damaged"):
            Journal(tmp_path, batches=1)


def test_a_record_of_a_later_version_is_not_cut(tmp_path: Path) -> None:
    """Its checksum fits, so it is not damaged."""
    sealing(tmp_path)
    segment = last_segment(tmp_path)
    signed = struct.pack("<2sBBIQI", b"rJ", 5, 2, 0, 12, 0)
    data = segment.read_bytes() + signed + struct.pack("<I", zlib.crc32(signed))
    segment.write_bytes(data)
    with pytest.raises(JournalError, match="a record of version 2"):
        Journal(tmp_path, batches=2)
    assert segment.read_bytes() == data


def test_a_record_that_ends_early_is_refused_where_it_is_read_alone(tmp_path: Path) -> None:
    """Inside its header, behind it, and one byte before its end; whole, it is read with its place."""
    last = written(tmp_path, 3)[-1]
    segment = last_segment(tmp_path)
    data = segment.read_bytes()
    read = read_entry(tmp_path, last.offset)
    assert (read.fields, read.offset, read.sequence) == (last.fields, last.offset, last.sequence)
    for size in (last.offset.offset, last.offset.offset + 5, last.offset.offset + 28, len(data) - 1):
        segment.write_bytes(data[:size])
        with pytest.raises(JournalError, match=rf"{segment.name}, offset {last.offset.offset}: the record ends early"):
            read_entry(tmp_path, last.offset)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """Two processes must not resume one run."""
    with Journal(tmp_path), pytest.raises(ConfigError, match="no other process"):
        Journal(tmp_path)
    Journal(tmp_path).close()


async def test_a_commit_returns_when_its_record_can_be_read(tmp_path: Path) -> None:
    """Each returns when its record can be read."""
    with Journal(tmp_path) as journal:

        async def one(number: int) -> None:
            journal.append("sample", {"number": number})
            await journal.commit()
            seen.append(len(list(read_journal(tmp_path))))

        seen: list[int] = []
        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(one, number)
        assert sorted(entry.fields["number"] for entry in read_journal(tmp_path)) == list(range(50))
        assert min(seen) >= 1


_FULL_DISK = """
import resource, signal, sys
from rollouts.errors import JournalError
from rollouts.runs.journal import Journal
journal = Journal(sys.argv[1])
journal.append("sample", {"number": 0})
journal.flush()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
journal.append("sample", {"number": 1, "text": "x" * 5000})
for attempt in range(2):
    try:
        journal.flush()
    except JournalError as error:
        print(error)
try:
    journal.append("sample", {})
except JournalError:
    print("closed")
journal.close()
"""


def test_a_disk_that_takes_no_more_is_said_and_what_was_committed_stays(tmp_path: Path) -> None:
    """A partly written record is cut."""
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.count("cannot be written: [Errno 27] File too large") == 2
    assert done.stdout.endswith("closed\n")
    size = last_segment(tmp_path).stat().st_size
    assert [entry.fields["number"] for entry in read_journal(tmp_path)] == [0]
    Journal(tmp_path).close()
    assert last_segment(tmp_path).stat().st_size == size


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """With its name."""
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "file" / "journal")


class SlowDisk(Journal):
    """A journal whose disk answers when the test says so."""

    asked: threading.Event
    answers: threading.Event

    def _to_disk(self, *_: int) -> None:
        self.asked.set()
        assert self.answers.wait(10)


class Watched(Journal):
    """A journal that knows which threads write."""

    def flush(self) -> None:
        self.threads = [*getattr(self, "threads", []), threading.current_thread()]
        super().flush()


async def test_a_large_commit_is_written_in_a_thread(tmp_path: Path) -> None:
    """Up to 1 MiB on the event loop, the columns included; more would hold up the other rollouts."""
    here = threading.current_thread()
    with Watched(tmp_path) as journal:
        for tokens, records in ((1000, 1), (70_000, 1), (70_000, 2), (1000, 1)):
            for _ in range(records):
                journal.append("sample", {"text": "x"}, columns(tokens))
            await journal.commit()
        assert [thread is here for thread in journal.threads] == [True, True, False, True]
    assert len(list(read_journal(tmp_path))) == 5


def test_nothing_but_a_sync_waits_for_the_disk(tmp_path: Path) -> None:
    """A commit on the event loop, which all rollouts share, returns while a batch is being synced."""
    with SlowDisk(tmp_path) as journal:
        journal.asked, journal.answers = threading.Event(), threading.Event()
        syncing = threading.Thread(target=anyio.run, args=(journal.sync,))
        syncing.start()
        try:
            assert journal.asked.wait(10)
            journal.append("sample", {"number": 0})
            committing = threading.Thread(target=journal.flush, daemon=True)
            committing.start()
            committing.join(5)
            assert not committing.is_alive()
            assert [entry.fields["number"] for entry in read_journal(tmp_path)] == [0]
        finally:
            journal.answers.set()
            syncing.join()


async def test_a_sync_reaches_the_disk_also_while_everything_is_cancelled(tmp_path: Path) -> None:
    """A run that stops writes its end; the costs of a run are bounds on the number of syncs."""
    with Journal(tmp_path) as journal:
        before = journal.syncs
        with anyio.CancelScope() as scope:
            scope.cancel()
            journal.append("sample", {"number": 0})
            await journal.sync()
        assert journal.syncs == before + 1
        assert [entry.fields["number"] for entry in read_journal(tmp_path)] == [0]


class _Unwritable(Columns):
    """Columns whose bytes are too many for a record, or for the memory."""

    def to_bytes(self) -> bytes:
        class Long(bytes):
            def __len__(self) -> int:
                return 1 << 32

        return Long(b"")


async def test_a_record_that_cannot_be_framed_ends_the_journal_before_it(tmp_path: Path) -> None:
    """Records queued with it are lost: no later one may follow, whose number would show a gap."""
    with Journal(tmp_path) as journal:
        journal.append("sample", {"number": 0})
        await journal.commit()
        journal.append("sample", {"number": 1})
        journal.append(
            "sample", {"number": 2}, _Unwritable(*(np.zeros(0, kind) for kind in (np.int32, np.bool_)), None)
        )
        for _ in range(2):
            with pytest.raises(JournalError, match="the journal cannot be written"):
                await journal.commit()
        with pytest.raises(JournalError, match="the journal cannot be written"):
            journal.append("sample", {"number": 3})
    assert [entry.fields["number"] for entry in read_journal(tmp_path)] == [0]
