"""The folder of a run that a stranger made: each verb ends with one line, never with a traceback, and never waits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

from rollouts.commands import main
from rollouts.runs.checksums import sealed
from rollouts.runs.verify import verify_run
from tests.stored_runs import edit_line, store_run

BATCH = "batches/batch-000000.jsonl"
NESTED = b'{"a":' * 5000 + b"1" + b"}" * 5000


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journaled run."""
    path = tmp_path_factory.mktemp("sound") / "run"
    anyio.run(partial(store_run, path, journaled=True))
    return path


def nested_line(run: Path) -> None:
    lines = (run / BATCH).read_bytes().splitlines(keepends=True)
    body = lines[0][: lines[0].rindex(b',"crc32"')]
    (run / BATCH).write_bytes(sealed(body + b',"more":' + NESTED + b"}") + b"".join(lines[1:]))


def nested_info(run: Path) -> None:
    (run / "run.json").write_bytes(NESTED)


def fifo(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


CHANGES = {
    "a nested line": nested_line,
    "a nested run.json": nested_info,
    "a FIFO as batch": fifo(BATCH),
    "a FIFO as dropped.jsonl": fifo("dropped.jsonl"),
    "a FIFO as metrics.jsonl": fifo("metrics.jsonl"),
    "a FIFO as segment": fifo("journal/segment-000000.journal"),
}


@pytest.mark.parametrize("verb", ["verify", "show", "view"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_hostile_folder_is_a_line_of_error(
    sound: Path, tmp_path: Path, change: str, verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Verification finds it, and the other verbs read the run or name the file."""
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    CHANGES[change](run)
    out = ["--out", str(tmp_path / "view.html")] if verb == "view" else []
    code = main([verb, str(run), *out])
    assert code in (1, 2) or verb != "verify"
    assert "Traceback" not in capfd.readouterr().err


def test_rewards_whose_sum_overflows_are_verified(sound: Path, tmp_path: Path) -> None:
    """The spread is infinite then; each reward is compared with the journal's."""
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    for number in range(8):
        edit_line(run / BATCH, number, lambda row: row.update(reward=1e308))
    report = verify_run(run)
    assert "mean reward inf" in str(report)
    assert any("reward" in str(violation) for violation in report.violations)


def test_times_that_no_clock_shows_are_viewed(sound: Path, tmp_path: Path) -> None:
    """As 0; the stored times stay what they are."""
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    edit_line(run / BATCH, 0, lambda row: row.update(times=[["tool", "x", 1e308, 1e308], ["tool", "x", 1.0, -1e308]]))
    assert main(["view", str(run), "--out", str(tmp_path / "view.html")]) == 0
