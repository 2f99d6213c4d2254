"""A resumed run restores the files that are not as its journal has them, and verify finds files that differ from it.

The numbers in the names are those of the findings: 5 (restoring), 25 (a full disk, a folder), 27 (the journal's copy).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from rollouts.errors import ConfigError, RolloutsError
from rollouts.runs import parquet
from rollouts.runs.checksums import CHECKSUM
from rollouts.runs.folder import read_rows
from rollouts.runs.info import read_info
from rollouts.runs.resume import Reopened, reopen
from rollouts.runs.verify import verify_run
from rollouts.training import DataBuffer, RolloutConfig
from rollouts.training.column_digests import column_digests
from rollouts.training.types import Sample
from tests.stored_runs import edit_line, some_sample, spread, store_run

KINDS = ("jsonl", "parquet")


@pytest.fixture(scope="module", params=KINDS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a journal, in each format."""
    path: Path = tmp_path_factory.mktemp("runs") / request.param
    anyio.run(partial(store_run, path, journaled=True, format=request.param))
    return path


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "run"))


def reopened(path: Path, *, allow_changes: bool = False, **settings: Any) -> Reopened:
    """Resume the run without generating anything, and end it again."""

    async def generate(prompts: Any) -> list[Sample]:
        return [some_sample(prompt, 0) for prompt in prompts]

    sizes: dict[str, Any] = {"batch_size": 3, "n_samples_per_prompt": 4}
    config = RolloutConfig(generate_fn=generate, filter_fn=spread, **sizes)
    rows = [{"prompt": f"question {number}", "label": number, "metadata": {"n": [number]}} for number in range(20)]
    description = {"config": config.describe(), **({"settings": settings} if settings else {})}
    opened = reopen(path, description, DataBuffer(rows), allow_changes=allow_changes)
    opened.run_journal.journal.close()
    return opened


def batch(path: Path, number: int) -> Path:
    return next((path / "batches").glob(f"batch-{number:06d}.*"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Every stored sample, without the place where it is stored."""
    return [row.data for row in read_rows(path, "kept")]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def without_a_row(path: Path) -> None:
    """Every remaining line or page is sound."""
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    else:
        path.write_bytes(parquet.encode(list(parquet.read(path))[1:]))


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip, as_folder, without_a_row])
def test_5_resume_restores_a_batch(run: Path, damage: Callable[[Path], None]) -> None:
    """A missing or damaged batch is written again from the journal, equal to before, and the report names it."""
    before, name = rows_of(run), batch(run, 0).name
    damage(batch(run, 0))
    assert not verify_run(run).ok
    opened = reopened(run)
    (restored,) = opened.restored
    assert restored.startswith(f"batches/{name} (")
    assert read_info(run)["segments"][-1]["restored"] == [restored]
    opened.writer.finish("finished", opened.state.accounting)
    assert rows_of(run) == before
    assert [str(violation) for violation in verify_run(run).violations if "batch" in violation.place] == []


@pytest.mark.parametrize("name", ["dropped.jsonl", "failed.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, without_a_row])
def test_5_resume_restores_the_other_files(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    """So are dropped and failed groups, and the lines of the metrics."""
    if not (run / name).is_file():
        pytest.skip("this run has no such group")
    before = sorted((run / name).read_bytes().splitlines())
    damage(run / name)
    opened = reopened(run)
    assert [line.partition(" ")[0] for line in opened.restored] == [name]
    assert sorted((run / name).read_bytes().splitlines()) == before


def test_5_an_intact_run_is_left_as_it_is(run: Path) -> None:
    """Nothing is restored, and no batch is written again."""
    before = {path: path.stat().st_mtime_ns for path in run.glob("batches/*")}
    assert reopened(run).restored == ()
    assert {path: path.stat().st_mtime_ns for path in run.glob("batches/*")} == before


def test_25_a_resume_on_a_full_disk_is_one_error(run: Path) -> None:
    """The error names the run and the cause; with space on the disk the run resumes."""
    (run / ".run.json.writing").symlink_to("/dev/full")
    with pytest.raises(RolloutsError, match=r"cannot be written: .*No space left.*--resume"):
        reopened(run)
    (run / ".run.json.writing").unlink()
    reopened(run)


@pytest.mark.parametrize("name", ["batches/batch-000000", "dropped.jsonl", "metrics.jsonl"])
def test_25_a_folder_in_place_of_a_file_is_a_violation(run: Path, name: str) -> None:
    """verify reports it, and does not raise."""
    path = batch(run, 0) if name.startswith("batches") else run / name
    as_folder(path)
    assert any(str(path) in violation.place for violation in verify_run(run).violations)


# -- settings --


def test_6_another_package_version_is_refused_or_recorded(run: Path) -> None:
    """Those of the last segment are compared; an allowed change is in run.json with the batch that it begins with."""
    reopened(run, versions={"rollouts": "7.0", "numpy": "2.0"})
    with pytest.raises(ConfigError, match=r"versions\.rollouts: got '7\.1'; expected '7\.0'.*--allow-changes"):
        reopened(run, versions={"rollouts": "7.1", "numpy": "2.0"})
    with pytest.raises(ConfigError, match=r"versions\.numpy: got None; expected '2\.0'"):
        reopened(run, versions={"rollouts": "7.0"})
    opened = reopened(run, allow_changes=True, versions={"rollouts": "7.1", "numpy": "2.0"})
    assert [str(change) for change in opened.changed] == ["versions.rollouts: got '7.1'; expected '7.0'"]
    segment = read_info(run)["segments"][-1]
    assert (segment["first_batch"], segment["changed"]) == (2, {"versions.rollouts": ["7.0", "7.1"]})
    opened.writer.finish("finished")
    assert reopened(run, versions={"rollouts": "7.1", "numpy": "2.0"}).changed == ()


def test_6_what_a_run_did_not_record_is_said_once(run: Path) -> None:
    """It is listed at the first resume, and compared from then on."""
    assert reopened(run, template={"text": "a"}).unrecorded == ("template",)
    assert reopened(run, template={"text": "a"}).unrecorded == ()
    with pytest.raises(ConfigError, match=r"template\.text: got 'b'; expected 'a'"):
        reopened(run, template={"text": "b"})


# -- the journal's copy --


def other_logprobs(row: dict[str, Any]) -> None:
    position = row["loss_mask"].index(1)
    row["rollout_log_probs"][position] = -0.125
    sample = Sample.from_dict({name: row[name] for name in ("prompt", "response", "tokens", "loss_mask", "reward")})
    sample.rollout_log_probs = row["rollout_log_probs"]
    row["digests"] = column_digests(sample.token_column, sample.mask_column, sample.logprob_column)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "reward": lambda row: row.update(reward=0.75),
    "response": lambda row: row.update(response="another"),
    "messages": lambda row: row["messages"][0].update(content="another"),
    "metadata": lambda row: row.update(metadata={"n": [99]}),
    "rollout_log_probs": other_logprobs,
    "status": lambda row: row.update(status="truncated"),
    "completions": lambda row: row["completions"][0].update(request_id="another"),
    "versions": lambda row: row["versions"][0].__setitem__(0, "another"),
}


@pytest.mark.parametrize("field", EDITS)
def test_27_an_edit_with_a_valid_checksum_is_found(run: Path, field: str) -> None:
    """A row that differs from the journal's copy is a violation that names the row and the field."""
    path = batch(run, 0)
    if path.suffix == ".jsonl":
        edit_line(path, 1, EDITS[field])
    else:
        rows = list(parquet.read(path))
        EDITS[field](rows[1])
        path.write_bytes(parquet.encode(rows))
    places = [violation.place for violation in verify_run(run).violations]
    assert any(path.name in place and "line 2" in place and f", {field}" in place for place in places), places


@pytest.mark.parametrize("edit", ["removed", "missed", "doubled", "changed", "exchanged"])
def test_27_the_metrics_are_sealed(run: Path, edit: str) -> None:
    """A removed file, and a removed, doubled, changed or moved line with a valid checksum, are violations."""
    path = run / "metrics.jsonl"
    assert verify_run(run).ok
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join([lines[0], *lines] if edit == "doubled" else lines[1:] if edit == "missed" else lines[::-1])
    )
    if edit == "removed":
        path.unlink()
    if edit == "changed":
        path.write_bytes(b"".join(lines))
        edit_line(path, 0, lambda row: row.update(seconds=-1.0))
    assert [violation.law for violation in verify_run(run).violations if "metrics.jsonl" in violation.place] == [4]


def test_27_the_metrics_of_a_run_without_journal_are_sealed_too(run: Path) -> None:
    """The checksum in run.json shows it."""
    shutil.rmtree(run / "journal")
    assert verify_run(run).ok
    edit_line(run / "metrics.jsonl", 0, lambda row: row.update(seconds=-1.0))
    assert [violation.law for violation in verify_run(run).violations] == [4]


def test_27_metrics_end_with_their_checksums(run: Path) -> None:
    """Every line is still sealed by itself."""
    assert all(CHECKSUM in msgspec.json.decode(line) for line in (run / "metrics.jsonl").read_bytes().splitlines())
