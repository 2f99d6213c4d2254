"""A machine that dies leaves what follows the last sealed batch in any state; the run resumes before the damage."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
import pytest

from rollouts.commands import main
from rollouts.errors import JournalError
from rollouts.runs.checksums import CHECKSUM, sealed
from rollouts.runs.info import read_info
from rollouts.runs.journal import Entry, Journal, read_journal
from rollouts.runs.reader import load_run
from rollouts.runs.resume import reopen
from rollouts.runs.run import run as run_recipe
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.start import begin
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.training import AsyncRolloutManager, Prompt
from rollouts.training.types import Group
from rollouts.views.page.source import open_source
from tests.runs.test_resume import BATCHES, Counted, buffer, config, count_batches, go_on
from tests.runs.test_run import a_recipe
from tests.stored_runs import some_sample

SEGMENT = "segment-000000.journal"
HEADER = 24

PLACES: dict[str, Callable[[int], int]] = {
    "magic": lambda length: 0,
    "length": lambda length: 5,
    "sequence": lambda length: 10,
    "payload checksum": lambda length: 17,
    "header checksum": lambda length: 21,
    "first byte of the payload": lambda length: HEADER,
    "payload": lambda length: HEADER + (length - HEADER) // 2,
    "last byte": lambda length: length - 1,
}
"""The byte of a record at which damage begins, by the record's length."""


def junk(size: int) -> bytes:
    return random.Random(size).randbytes(size)


KINDS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda rest: b"",
    "zeroed": lambda rest: bytes(len(rest)),
    "junk": lambda rest: junk(len(rest)),
    "hole": lambda rest: bytes(min(512, len(rest))) + rest[512:],
}
"""What becomes of the bytes from the place of the damage on."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed before it sealed its third batch, whose groups are settled."""

    folder = tmp_path_factory.mktemp("killed")
    anyio.run(_killed, folder)
    return folder / "killed"


async def _killed(folder: Path) -> None:
    settings, data = config(Counted(), over_sampling_factor=1.0), buffer()
    description = {"recipe": "test", "config": settings.describe()}
    writer = RunWriter(folder / "run", description, format="jsonl")
    run_journal = begin(folder / "run", description, data)
    with run_journal.journal:
        async with AsyncRolloutManager(settings, data, on_group=writer.on_group, rollout_log=run_journal) as manager:
            for batch in range(3):
                samples = await manager.generate_batch()
                await run_journal.journal.sync()
                if batch < 2:
                    writer.write_batch(samples, manager.metrics, attrs.evolve(manager.accounting))
            shutil.copytree(folder / "run", folder / "killed")
    entries, _, seal = records(folder / "killed")
    with (folder / "killed" / "journal" / SEGMENT).open("r+b") as file:
        file.truncate(entries[seal].offset.offset)


def records(run: Path) -> tuple[list[Entry], list[int], int]:
    """The records of a run's journal, their ends, and the position of the last seal among them."""
    entries = list(read_journal(run / "journal"))
    ends = [entry.offset.offset for entry in entries[1:]] + [(run / "journal" / SEGMENT).stat().st_size]
    return entries, ends, max(number for number, entry in enumerate(entries) if entry.kind == "sealed")


def damaged(killed: Path, path: Path, number: int, place: str, kind: str) -> tuple[Path, int]:
    """A copy of the run with a damaged record, and the offset of the record."""
    entries, ends, _ = records(killed)
    shutil.copytree(killed, path)
    segment = path / "journal" / SEGMENT
    data, start = segment.read_bytes(), entries[number].offset.offset
    at = start + PLACES[place](ends[number] - start)
    while not data[at]:  # zeros would change nothing
        at -= 1
    segment.write_bytes(data[:at] + KINDS[kind](data[at:]))
    return path, start


def holed(killed: Path, path: Path, number: int) -> tuple[Path, int]:
    """A copy of the run with zeros in the payload of a record, and whole records behind it."""
    entries, _, _ = records(killed)
    shutil.copytree(killed, path)
    segment = path / "journal" / SEGMENT
    data, start = bytearray(segment.read_bytes()), entries[number].offset.offset
    data[start + HEADER : start + HEADER + 9] = bytes(9)
    segment.write_bytes(data)
    return path, start


DESCRIPTION = {"recipe": "test", "config": config(Counted()).describe()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_damage_behind_the_last_seal_is_cut(killed: Path, tmp_path: Path, place: str, kind: str) -> None:
    """In each part of each of five records: every record before it stays, and the cut is reported and stored."""
    entries, _, seal = records(killed)
    behind = range(seal + 1, len(entries))
    assert len(behind) > 8
    for number in {behind[0], behind[1], behind[len(behind) // 2], behind[-2], behind[-1]}:
        run, start = damaged(killed, tmp_path / str(number), number, place, kind)
        clean = (run / "journal" / SEGMENT).stat().st_size == start
        opened = reopen(run, DESCRIPTION, buffer())
        opened.run_journal.journal.close()
        opened.state.accounting.check()
        kept = list(read_journal(run / "journal"))
        assert [entry.sequence for entry in kept[:-1]] == [entry.sequence for entry in entries[:number]]
        assert kept[-1].kind == "run"
        if not clean:
            assert opened.torn is not None
            assert (opened.torn.file, opened.torn.offset) == (SEGMENT, start)
            assert read_info(run)["segments"][-1]["torn"] == attrs.asdict(opened.torn) == kept[-1].fields["torn"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
async def test_a_run_with_damage_behind_its_last_seal_ends_as_any_other(
    killed: Path, tmp_path: Path, place: str, kind: str
) -> None:
    """Laws 1 to 5 hold on the final run, the accounting adds up, and no sealed batch changed."""
    _, _, seal = records(killed)
    run, _ = damaged(killed, tmp_path / "run", seal + 3, place, kind)
    before = [(run / "batches" / f"batch-00000{number}.jsonl").read_bytes() for number in range(2)]
    ended = await go_on(run, Counted())
    ended.accounting.check()
    assert ended.batches == BATCHES
    report = verify_run(run)
    assert report.ok, [str(violation) for violation in report.violations]
    assert [(run / "batches" / f"batch-00000{number}.jsonl").read_bytes() for number in range(2)] == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_damage_before_the_last_seal_is_an_error(killed: Path, tmp_path: Path, place: str, kind: str) -> None:
    """In the seal, before it, and before the first seal: file and offset are named, and nothing is changed."""
    _, _, seal = records(killed)
    for number in (seal, seal - 1, seal // 2, 1):
        run, start = damaged(killed, tmp_path / str(number), number, place, kind)
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name[0] != "."}
        with pytest.raises(JournalError, match=f"{SEGMENT}, offset {start}"):
            reopen(run, DESCRIPTION, buffer())
        assert {path: path.read_bytes() for path in before} == before


def test_sound_records_behind_a_hole_are_counted_and_cut(killed: Path, tmp_path: Path) -> None:
    """They follow a record that is lost, and what they say may depend on it."""
    entries, ends, seal = records(killed)
    run, start = holed(killed, tmp_path / "run", seal + 1)
    opened = reopen(run, DESCRIPTION, buffer())
    opened.run_journal.journal.close()
    assert opened.torn is not None
    assert opened.torn.records == len(entries) - seal - 2 > 3
    assert opened.torn.size == ends[-1] - start


def test_a_batch_whose_sync_was_under_way_is_not_sealed(killed: Path, tmp_path: Path) -> None:
    """Its seal can be on disk and records before it not; the batch was never handed out, so both are cut."""
    _, _, seal = records(killed)
    run, start = holed(killed, tmp_path / "run", seal - 1)
    (run / "batches" / "batch-000001.jsonl").unlink()
    count_batches(run, 1)
    opened = reopen(run, DESCRIPTION, buffer())
    opened.run_journal.journal.close()
    assert len(opened.history.sealed) == 1
    assert opened.torn is not None
    assert opened.torn.offset == start


def test_two_seals_behind_damage_are_an_error_whatever_run_json_says(killed: Path, tmp_path: Path) -> None:
    """The second seal was written after the first was on disk."""
    entries, _, _ = records(killed)
    first = next(number for number, entry in enumerate(entries) if entry.kind == "sealed")
    run, start = holed(killed, tmp_path / "run", first - 1)
    count_batches(run, 0)
    with pytest.raises(JournalError, match=f"{SEGMENT}, offset {start}: damaged"):
        reopen(run, DESCRIPTION, buffer())


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_with_a_torn_tail_can_be_looked_at(
    killed: Path, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """verify finds no violation and reports the tail; show lists the groups."""
    _, _, seal = records(killed)
    run, start = damaged(killed, tmp_path / "run", seal + 3, "payload", kind)
    report = verify_run(run)
    assert report.ok, [str(violation) for violation in report.violations]
    assert f"{SEGMENT}, offset {start}: " in str(report)
    assert main(["show", str(run)]) == 0
    assert main(["verify", str(run)]) == 0
    assert f"{SEGMENT}, offset {start}: " in " ".join(capfd.readouterr().out.split())


async def test_a_torn_tail_of_a_run_that_ended_is_damage(killed: Path, tmp_path: Path) -> None:
    """Its journal was on disk when it ended: verify names the place, and a resume still continues."""
    run = Path(shutil.copytree(killed, tmp_path / "run"))
    await go_on(run, Counted())
    data = (run / "journal" / SEGMENT).read_bytes()
    (run / "journal" / SEGMENT).write_bytes(data + junk(100))
    report = verify_run(run)
    assert any(f"{SEGMENT}, offset {len(data)}: damaged" in str(violation) for violation in report.violations)
    await go_on(run, Counted())
    assert verify_run(run).ok


# -- the other files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dropped.jsonl", "failed.jsonl", "unbatched.jsonl", "metrics.jsonl", "recording"])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
async def test_an_append_that_the_machine_did_not_finish_is_written_again(
    killed: Path, tmp_path: Path, name: str, kind: str, part: float
) -> None:
    """verify, show and view work on the killed run, and the resumed run keeps laws 1 to 5."""
    run = Path(shutil.copytree(killed, tmp_path / "run"))
    file = run / name
    if name == "recording":
        with Journal(file) as journal:
            for number in range(5):
                journal.append("event", {"index": number, "what": "begin"})
        file /= SEGMENT
    elif name == "unbatched.jsonl":
        shutil.copy(run / "batches" / "batch-000001.jsonl", file)
    elif name == "metrics.jsonl":
        file.write_bytes(file.read_bytes() + sealed(msgspec.json.encode({"batch": 2, "text": "x" * 900})))
    data = file.read_bytes()
    lines = data.splitlines(keepends=True)
    start = 40 if name == "recording" else len(data) - len(lines[-1])
    if name in ("dropped.jsonl", "failed.jsonl"):
        last = msgspec.json.decode(lines[-1])["group_index"]
        start -= sum(len(line) for line in lines[:-1] if msgspec.json.decode(line)["group_index"] == last)
    at = start + int(part * (len(data) - start))
    file.write_bytes(data[:at] + KINDS[kind](data[at:]))
    report = verify_run(run)
    assert report.ok, [str(violation) for violation in report.violations]
    if name in ("dropped.jsonl", "failed.jsonl") and part > 0:
        assert f"{file} ends with " in str(report)
    assert main(["show", str(run)]) == 0
    assert main(["ls", str(tmp_path)]) == 0
    assert open_source(run).metrics
    assert len(list(load_run(run, "all"))) == len(load_run(run, "all"))
    await go_on(run, Counted())
    Journal(run / "recording", batches=0).close()
    report = verify_run(run)
    assert report.ok, [str(violation) for violation in report.violations]


def test_groups_of_a_file_that_the_journal_lost_are_a_note(killed: Path, tmp_path: Path) -> None:
    """A dropped group is on disk before its record in the journal is; verify of the killed run finds no violation."""
    run = Path(shutil.copytree(killed, tmp_path / "run"))
    line = (run / "dropped.jsonl").read_bytes().splitlines(keepends=True)
    rows = [msgspec.json.decode(each) for each in line]
    for row in rows[-3:]:
        row.pop(CHECKSUM)
        row |= {"group_index": 50, "index": 150 + row["index"] % 3, "rollout_id": 150 + row["index"] % 3}
        for call in row["completions"]:
            call["request_id"] = ""
        with (run / "dropped.jsonl").open("ab") as file:
            file.write(sealed(msgspec.json.encode(row)))
    report = verify_run(run)
    assert "groups [50] are in a file and not in the journal" in str(report)
    assert not any("not settled" in str(violation) for violation in report.violations)


def test_a_damaged_line_with_two_groups_behind_it_is_damage(killed: Path, tmp_path: Path) -> None:
    """Also in a killed run: each append was on disk before the next."""
    run = Path(shutil.copytree(killed, tmp_path / "run"))
    prompts = [Prompt("?", group_index=100 + number, index=300 + number) for number in range(3)]
    writer = RunWriter(tmp_path / "other", format="jsonl")
    for prompt in prompts:
        writer.on_group(Group(prompt, (some_sample(prompt, 0),), "dropped", "why"))
    data = bytearray((tmp_path / "other" / "dropped.jsonl").read_bytes())
    data[50] ^= 1
    (run / "dropped.jsonl").write_bytes(data)
    assert any("dropped.jsonl, line 1: " in str(violation) for violation in verify_run(run).violations)


async def test_a_run_has_its_journal_on_disk_before_its_end(tmp_path: Path) -> None:
    """Everything in the journal is synced while run.json still has the status "running"."""
    synced: list[tuple[str, int]] = []

    class Watched(Journal):
        def _to_disk(self, *arguments: int) -> None:
            super()._to_disk(*arguments)
            synced.append((read_info(tmp_path)["status"], (self.path / SEGMENT).stat().st_size))

    recipe = a_recipe()
    writer = RunWriter(tmp_path, recipe.describe())
    with Watched(tmp_path / "journal") as journal:

        def on_batch(_: Any) -> None:
            journal.append("event", {"after": "the seal"})

        await run_recipe(recipe, writer, run_journal=RunJournal(journal), on_batch=on_batch)
    size = (tmp_path / "journal" / SEGMENT).stat().st_size
    assert max(synced_size for status, synced_size in synced if status == "running") == size
