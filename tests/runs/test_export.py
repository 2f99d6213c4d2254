"""Exports: whole, the same columns in each format, and written in constant memory."""

from __future__ import annotations

import gc
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollouts.commands import main
from rollouts.errors import ConfigError
from rollouts.runs.columns import plain_row
from rollouts.runs.export import Kind, export_rows
from rollouts.runs.folder import read_rows
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from tests.stored_runs import store_long_run, store_run


def read(path: Path, kind: Kind) -> list[dict[str, Any]]:
    if kind == "jsonl":
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    files = [path] if kind == "parquet" else sorted((path / "data").iterdir())
    pyarrow = pytest.importorskip("pyarrow.parquet")
    return [row for file in files for row in pyarrow.read_table(file).to_pylist()]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
async def test_an_export_holds_the_rows_of_the_run(tmp_path: Path, kind: Kind, format: Any) -> None:
    """Every field of every sample of the requested groups, in order, for both formats of a run."""
    await store_run(tmp_path / "run", format=format)
    for outcome in ("kept", "dropped", "all"):
        out = tmp_path / f"{outcome}.{kind}"
        export_rows(tmp_path / "run", out, kind, outcome)  # type: ignore[arg-type]
        stored = [plain_row(row.data) for row in read_rows(tmp_path / "run", outcome)]  # type: ignore[arg-type]
        assert msgspec.json.encode(read(out, kind)) == msgspec.json.encode(stored)


@pytest.mark.extra
async def test_datasets_loads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets.load_dataset(OUT)`` finds every shard, and loaded samples are equal."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    await store_run(tmp_path / "run")
    files = export_rows(tmp_path / "run", tmp_path / "out", "hf", shard_bytes=1)
    assert len(files) > 1
    data = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"), split="train")
    samples = list(load_run(tmp_path / "run"))
    assert data["tokens"][:] == [sample.tokens for sample in samples]
    stored = list(read_rows(tmp_path / "run"))
    assert data[5] == plain_row(stored[5].data)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_a_longer_run_takes_no_more_memory(tmp_path: Path, kind: Kind) -> None:
    """From one batch and from four.

    A peak contains what the other threads of the process allocate meanwhile; a run that takes more memory does so in
    each of three exports.
    """
    for batches in (1, 4):
        store_long_run(tmp_path / f"run{batches}", batches)
    export_rows(tmp_path / "run1", tmp_path / "first", kind)  # imports what the format needs
    least = {1: math.inf, 4: math.inf}
    for attempt in range(3):
        for batches in least:
            gc.collect()
            tracemalloc.start()
            export_rows(tmp_path / f"run{batches}", tmp_path / f"out{batches} {attempt}", kind)
            least[batches] = min(least[batches], tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        if least[4] < 1.3 * least[1]:
            break
    assert least[4] < 1.3 * least[1]


async def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A damaged line raises with file and line, and an existing output file stays unchanged."""
    await store_run(tmp_path / "run")
    batch = tmp_path / "run" / "batches" / "batch-000001.jsonl"
    batch.write_bytes(batch.read_bytes().replace(b"{", b"[", 1))
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"batch-000001.jsonl, line 1: corrupted"):
        export_rows(tmp_path / "run", tmp_path / "out.jsonl", "jsonl", overwrite=True)
    with pytest.raises(ConfigError, match=r"batch-000001.jsonl, line 1: corrupted"):
        export_rows(tmp_path / "run", tmp_path / "out", "hf")
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "run"}  # noqa: ASYNC240 - a test may block
    assert (tmp_path / "out.jsonl").read_text() == "mine"


async def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    """So is a run without a sample of that outcome."""
    await store_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"OUT: got .*; expected a folder that is new or empty"):
        export_rows(tmp_path / "run", tmp_path / "run", "hf", overwrite=True)
    RunWriter(tmp_path / "empty")
    with pytest.raises(ConfigError, match="expected a run with at least one sample of outcome 'failed'"):
        export_rows(tmp_path / "empty", tmp_path / "out", "jsonl", "failed")


@pytest.mark.parametrize("mine", ["README.md", "data/mine.parquet"])
async def test_a_foreign_folder_is_never_replaced(tmp_path: Path, mine: str) -> None:
    """A data set with README.md and data/ looks like an export; before, ``--overwrite`` deleted it."""
    await store_run(tmp_path / "run")
    out = tmp_path / "out"
    if mine != "README.md":
        export_rows(tmp_path / "run", out, "hf")
    (out / "data").mkdir(parents=True, exist_ok=True)
    (out / mine).write_text("Mine.")
    with pytest.raises(ConfigError, match=r"OUT: got .*; expected a folder that is new or empty$"):
        export_rows(tmp_path / "run", out, "hf", overwrite=True)
    assert (out / mine).read_text() == "Mine."


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf", "slime"])
async def test_no_export_goes_into_the_files_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """An export cannot replace a stored file; it may be written to the run's own folder."""
    await store_run(tmp_path / "run")
    for name in ("failed.jsonl", "batches/batch-000000.jsonl", "batches/data-{rollout_id}.pt"):
        assert main(["export", str(tmp_path / "run"), "--to", kind, str(tmp_path / "run" / name)]) == 2
        assert "; expected a place outside the files of the run in" in capsys.readouterr().err
    assert verify_run(tmp_path / "run").ok
    assert export_rows(tmp_path / "run", tmp_path / "run" / "kept.jsonl", "jsonl")


async def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``rollouts export RUN --to hf OUT``; an error is one line."""
    await store_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "out"), "--outcome", "all"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'data' / 'train-00000.parquet'}\n"
    assert main(["export", str(tmp_path / "run"), "--to", "slime", "x.pt", "--outcome", "all"]) == 2
    assert "--outcome: got 'all'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf", "slime"])
async def test_an_existing_output_is_replaced_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Without --overwrite nothing is written, and the message names the option."""
    await store_run(tmp_path / "run")
    out = tmp_path / "out_{rollout_id}.pt" if kind == "slime" else tmp_path / "out"
    command = ["export", str(tmp_path / "run"), "--to", kind, str(out)]
    assert main(command) == 0
    written = capsys.readouterr().out.splitlines()
    stamps = [Path(file).stat().st_mtime_ns for file in written]  # noqa: ASYNC240 - a test may block
    assert main(command) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert [Path(file).stat().st_mtime_ns for file in written] == stamps  # noqa: ASYNC240
    assert main([*command, "--overwrite"]) == 0
    assert capsys.readouterr().out.splitlines() == written
