"""Changed bits: for a flipped bit in any file of a run, verification names the file and the record."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

from rollouts.commands import main
from rollouts.runs.checksums import CHECKSUM
from rollouts.runs.damage import find_damage
from rollouts.runs.journal import Journal
from rollouts.runs.layout import CHECKED, RECORDING
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from tests.stored_runs import store_run

FLIPS = 8
"""Random bits for each file, in addition to those of its first and last bytes."""
ENDS = 1


@pytest.fixture(scope="module", params=["jsonl", "parquet"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journaled run of one batch with dropped, failed and unbatched groups, and with a recording."""
    path = tmp_path_factory.mktemp("sound") / "run"
    write = partial(
        store_run, path, format=request.param, batches=1, journaled=True, over_sampling_factor=4.0, batch_size=4
    )
    anyio.run(write)
    with Journal(path / RECORDING) as journal:
        for index in range(9):
            journal.append("event", {"index": index, "what": "begin"})
    return path


def files_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.stat().st_size)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_anywhere_is_found_and_located(sound: Path, tmp_path: Path) -> None:
    """The report names the line of a text file, the Parquet file, or the segment of journal and recording."""
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    assert verify_run(run).ok
    files = files_of(run)
    assert {"run.json", "metrics.jsonl", "dropped.jsonl", "failed.jsonl", "unbatched.jsonl"} < set(files)
    rng = random.Random(0)
    for name in files:
        data = (run / name).read_bytes()
        bits = {*range(8 * ENDS), *range(8 * (len(data) - ENDS), 8 * len(data))}
        for bit in sorted(bits | {rng.randrange(8 * len(data)) for _ in range(FLIPS)}):
            (run / name).write_bytes(flipped(data, bit))
            report = verify_run(run)
            matching = [str(violation) for violation in report.violations if str(run / name) in str(violation)]
            assert matching, (name, bit)
            if name.endswith(".jsonl"):
                line = 1 + data[: bit // 8].count(b"\n")
                assert any(f"{run / name}, line {line}: " in text for text in matching), (name, bit, matching)
        (run / name).write_bytes(data)
    assert verify_run(run).ok


def test_a_damaged_column_of_a_batch_is_named(tmp_path: Path) -> None:
    """A bit in a page is located by rows and column."""
    run = tmp_path / "run"
    anyio.run(partial(store_run, run, format="parquet"))
    file = run / "batches" / "batch-000000.parquet"
    data = file.read_bytes()
    places = set()
    for bit in range(0, 8 * len(data), 401):
        file.write_bytes(flipped(data, bit))
        ((place, got),) = find_damage(run)
        assert place == str(file)
        places.add(got.split(" (")[0])
    assert {"damaged in rows 1 to 12, column tokens", "damaged in rows 1 to 12, column messages"} <= places
    assert "damaged in its footer, or between its columns" in places


def test_the_command_names_the_line_and_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed letter of a prompt, in a line that is still JSON."""
    run = tmp_path / "run"
    anyio.run(partial(store_run, run))
    file = run / "batches" / "batch-000000.jsonl"
    file.write_bytes(file.read_bytes().replace(b"question", b"puestion", 1))
    assert main(["verify", str(run)]) == 1
    assert f"{file}, line 1: got damaged (its checksum does not fit)" in capsys.readouterr().err


def test_a_run_of_before_checksums_is_verified_as_far_as_it_can_be(tmp_path: Path) -> None:
    """The report lists what is not covered, also after the run is resumed."""
    run = tmp_path / "run"
    anyio.run(partial(store_run, run))
    for path in [*run.glob("*.json*"), *run.glob("batches/*")]:
        text = path.read_bytes()
        rows = [msgspec.json.decode(line) for line in ([text] if path.suffix == ".json" else text.splitlines())]
        for row in rows:
            del row[CHECKSUM]
            row.pop(CHECKED, None)
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    for report in (verify_run(run), (RunWriter.reopen(run), verify_run(run))[1]):
        assert report.ok
        assert "its files have no checksums" in str(report)
