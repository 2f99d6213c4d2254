"""Runs stored by ``rollouts run`` of 0.1.0: finished (Parquet) and killed (JSONL), without and with settings.

They stay readable. They are of the calculator recipe on the embedded engine, in a checkout at ``/srv/rollouts``; those
with settings are of ``stored_by_0_1/calculator.py``.
"""

from __future__ import annotations

import importlib.metadata
import io
import re
import shutil
from pathlib import Path

import attrs
import msgspec
import pytest
from rich.console import Console

import rollouts
from rollouts.commands import main
from rollouts.commands.run import launch
from rollouts.commands.target import RunTarget
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import ConfigError
from rollouts.runs.export import export_rows
from rollouts.runs.folder import read_rows
from rollouts.runs.info import read_info
from rollouts.runs.reader import load_run
from rollouts.runs.run_history import RunHistory
from rollouts.runs.verify import verify_run

STORED = Path(__file__).parent / "stored_by_0_1"
RECIPE = STORED / "calculator.py"


@pytest.fixture(params=["finished", "killed", "finished_with_settings", "killed_with_settings"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a stored run."""
    return Path(shutil.copytree(STORED / request.param, tmp_path / request.param))


def _version(package: str) -> str:
    return rollouts.__version__ if package == "rollouts" else importlib.metadata.version(package)


def test_it_reads_and_verifies(run: Path) -> None:
    """Samples have their completions under the current name, and the laws hold."""
    samples = list(load_run(run, "all"))
    assert len(samples) >= 8
    assert all(sample.completions for sample in samples)
    assert all("calls" not in row.data and row.data["completions"] for row in read_rows(run, "all"))
    report = verify_run(run)
    assert report.violations == []
    assert report.checked[1]["completions"] == sum(len(sample.completions) for sample in samples)


def test_its_journal_reads(run: Path) -> None:
    """The journal has the finished rollouts, and the turns of the others."""
    history = RunHistory.read(run / "journal")
    assert history.sealed
    for index in history.rollouts:
        assert all(sample.completions for sample in history.samples(index))
    for index in history.turns:
        assert all(turn.fields["completions"] for turn in history.read_turns(index))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_it_exports(run: Path, kind: str, tmp_path: Path) -> None:
    """Each format exports all samples of its batches."""
    (out,) = export_rows(run, str(tmp_path / f"out.{kind}"), kind, "kept")
    rows = (
        pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
        if kind == "parquet"
        else list(map(msgspec.json.decode, out.read_bytes().splitlines()))
    )
    assert [row["tokens"] for row in rows] == [list(sample.tokens) for sample in load_run(run)]


def test_it_shows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``show`` prints a transcript; without the tokenizer of the run, which is gone, it prints the messages."""
    assert main(["show", str(run), "--sample", "0", "--tokenizer", str(DEMO_MODEL)]) == 0
    assert "sampled" in capsys.readouterr().out
    assert main(["show", str(run), "--sample", "0"]) == 0
    assert "messages instead of tokens" in capsys.readouterr().out


async def test_it_resumes(run: Path) -> None:
    """It resumes on the same demo model, one in a separate engine, the others at a server that names it.

    The whole run verifies, and earlier samples are unchanged.

    Settings that the run did not store are printed, and stored from now on; those that it stored are the same, but for
    the versions of packages that are newer here: these must be allowed by name.
    """
    target = RunTarget(recipe=RECIPE, batches=3)
    if run.name == "finished":
        await _resume(run, target)
        return
    async with running_server(DEMO_MODEL, reported_model=Path("/srv/rollouts/rollouts/engine/demo_model")) as url:
        await _resume(run, attrs.evolve(target, urls=(url,), model=str(DEMO_MODEL)))


async def _resume(run: Path, target: RunTarget) -> None:
    stored = read_info(run).get("settings", {})
    before = {sample.index: list(sample.tokens) for sample in load_run(run)}
    console = Console(file=io.StringIO(), width=400)
    newer = stored.get("versions", {}) != {name: _version(name) for name in stored.get("versions", {})}
    if newer:
        with pytest.raises(ConfigError, match=r"^--resume, settings: versions\.\w+: [^·]*(· versions\.\w+: [^·]*)*$"):
            await launch(target, run, "auto", False, console, resume=True)
    result = await launch(target, run, "auto", False, console, resume=True, allow_changes=newer)
    assert result is not None
    assert (result.error, result.status) == (None, "finished")
    after = {sample.index: list(sample.tokens) for sample in load_run(run)}
    assert before.items() <= after.items()
    assert len(after) == 12
    assert isinstance(console.file, io.StringIO)
    for name in ("recipe", "template", "tokenizer", "versions"):
        said = re.search(f"not stored with the run, not compared: .*{name}", console.file.getvalue())
        assert (said is None) == (name in stored)
        if name != "versions" or not newer:
            assert read_info(run)["settings"][name] == stored.get(name, read_info(run)["settings"][name])
    assert verify_run(run).violations == []
