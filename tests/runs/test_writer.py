"""Runs on disk: groups are written whole and once, and read back equal."""

from __future__ import annotations

import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollouts.concurrency.times import Timeline
from rollouts.dtypes import Prompt, VersionSpan
from rollouts.errors import ConfigError
from rollouts.runs.folder import read_rows
from rollouts.runs.info import read_info
from rollouts.runs.reader import load_run
from rollouts.runs.writer import Format, RunWriter, check_free
from rollouts.training import Group, Sample
from rollouts.training.metrics import Accounting
from tests.stored_runs import edit_line, some_sample, store_run

FORMATS: list[Format] = ["jsonl", "parquet"]


def group(number: int, outcome: str = "kept", reason: str = "", size: int = 2) -> Group:
    prompt = Prompt(f"question {number}", label=number, group_index=number)
    samples = []
    for member in range(size):
        request = Prompt(prompt.prompt, label=number, group_index=number, index=number * size + member)
        samples.append(some_sample(request, 0))
    return Group(prompt, tuple(samples), outcome, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
async def test_samples_come_back_as_they_were(tmp_path: Path, format: Format) -> None:
    """A stored batch loads as equal samples, in both formats."""
    groups = [group(0), group(1)]
    samples = [sample for each in groups for sample in each.samples]
    writer = RunWriter(tmp_path / "run", format=format)
    writer.write_batch(samples, {"batch": 0})
    assert list(load_run(tmp_path / "run")) == samples


@pytest.mark.parametrize("format", FORMATS)
def test_logprobs_come_back_bit_for_bit(tmp_path: Path, format: Format) -> None:
    """Any float32 logprob survives the disk exactly, the smallest and the largest too."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**31, 5000, dtype=np.uint32).view(np.float32)
    logprobs = -bits[np.isfinite(bits)]
    sample = Sample(tokens=[1] * len(logprobs), loss_mask=[1] * len(logprobs), rollout_log_probs=logprobs)
    RunWriter(tmp_path / "run", format=format).write_batch([sample], {})
    (loaded,) = load_run(tmp_path / "run")
    assert loaded.logprob_column is not None
    assert np.array_equal(logprobs.view(np.uint32), loaded.logprob_column.view(np.uint32))


@pytest.mark.parametrize("format", FORMATS)
def test_the_formats_hold_the_same_rows(tmp_path: Path, format: Format) -> None:
    """A row is Sample.to_dict() plus outcome, reason, batch and checksums."""
    (sample, _) = group(0).samples
    RunWriter(tmp_path / "run", format=format).write_batch([sample], {})
    (row,) = read_rows(tmp_path / "run")
    plain = msgspec.json.decode(msgspec.json.encode(sample.to_dict()))
    assert plain == {key: row.data[key] for key in plain}
    assert row.data.keys() - plain.keys() == {"outcome", "reason", "batch", "digests"}
    assert (row.data["outcome"], row.data["batch"]) == ("kept", 0)


async def test_every_settled_group_is_in_one_file(tmp_path: Path) -> None:
    """Batches, dropped, failed and unbatched contain the groups that the manager counted, each once."""
    manager = await store_run(tmp_path / "run")
    stored = {
        place: {sample.group_index for sample in load_run(tmp_path / "run", place)}  # type: ignore[arg-type]
        for place in ("kept", "dropped", "failed", "unbatched")
    }
    counts = manager.accounting
    assert [len(groups) for groups in stored.values()] == [counts.in_batch, counts.dropped, counts.failed, counts.ready]
    assert sum(map(len, stored.values())) == len(set().union(*stored.values()))
    assert len(load_run(tmp_path / "run", "all")) == sum(len(load_run(tmp_path / "run", outcome)) for outcome in stored)  # type: ignore[arg-type]


async def test_dropped_groups_are_on_disk_at_once(tmp_path: Path) -> None:
    """A rejected group does not wait for the batch; an accepted one does."""
    writer = RunWriter(tmp_path / "run")
    writer.on_group(group(0))
    writer.on_group(group(1, "dropped", "check_spread"))
    writer.on_group(group(2, "failed", "RewardFailure: no"))
    assert [row.data["reason"] for row in read_rows(tmp_path / "run", "all")] == ["check_spread"] * 2 + [
        "RewardFailure: no"
    ] * 2


def test_groups_in_no_batch_are_kept_when_the_run_stops(tmp_path: Path) -> None:
    """Accepted groups without a batch are written to unbatched.jsonl, by group index."""
    writer = RunWriter(tmp_path / "run")
    for number in (2, 0, 1):
        writer.on_group(group(number))
    writer.write_batch(group(1).samples, {})
    writer.finish("stopped", Accounting(taken=3, in_batch=1, ready=2))
    assert [sample.group_index for sample in load_run(tmp_path / "run", "unbatched")] == [0, 0, 2, 2]
    assert read_info(tmp_path / "run")["unbatched_groups"] == 2


def test_groups_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    """on_group may be called from any number of threads: lines stay whole, groups stay together."""
    writer = RunWriter(tmp_path / "run")
    groups = [group(number, "dropped", "r") for number in range(40)]
    threads = [threading.Thread(target=lambda part=groups[k::4]: [writer.on_group(g) for g in part]) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = [sample.group_index for sample in load_run(tmp_path / "run", "dropped")]
    assert order[::2] == order[1::2]
    assert sorted(order[::2]) == list(range(40))


def test_a_batch_whose_metrics_are_refused_does_not_count(tmp_path: Path) -> None:
    """A disk that fills up between a batch and its line of metrics: the groups are stored once, in no batch."""
    writer = RunWriter(tmp_path / "run")
    writer.on_group(group(0))
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        writer.write_batch(group(0).samples, {})
    (tmp_path / "run" / "metrics.jsonl").rmdir()
    writer.finish("failed", Accounting(taken=1, returned=1))
    assert [sample.group_index for sample in load_run(tmp_path / "run", "all")] == [0, 0]
    assert read_info(tmp_path / "run")["batches"] == 0


def test_a_batch_is_written_a_row_at_a_time(tmp_path: Path) -> None:
    """The memory of a write does not grow with the batch: a row of plain data is several times its sample."""
    ids = np.arange(10_000, dtype=np.int32)
    samples = [Sample(tokens=ids, loss_mask=ids > 5, rollout_log_probs=ids / 2, metadata={}) for _ in range(20)]
    writer = RunWriter(tmp_path / "run", format="jsonl")
    tracemalloc.start()
    try:
        path = writer.write_samples(0, samples)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < path.stat().st_size, "twenty rows as text; as plain data they are four times as large"
    writer.finish("failed", Accounting())


_FULL = """
import resource, signal, sys
from pathlib import Path
from rollouts.runs.writer import append

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
append(path, [b"first\\n"])
resource.setrlimit(resource.RLIMIT_FSIZE, (13, resource.RLIM_INFINITY))
try:
    append(path, [b"whole\\n", b"second\\n"])
except OSError as error:
    assert "too large" in str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    append(path, [b"third\\n"])
"""


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    """Lines of which the disk takes a part are removed, so that the next one is whole; short lines are not buffered."""
    subprocess.run([sys.executable, "-c", _FULL, str(tmp_path / "lines")], check=True)
    assert (tmp_path / "lines").read_bytes() == b"first\nthird\n"


def test_run_json_says_how_it_stands(tmp_path: Path) -> None:
    """Status, versions and the caller's description are stored from the start, and the end is recorded."""
    writer = RunWriter(tmp_path / "run", {"seed": 7}, format="jsonl")
    writer.update(server={"version": "0.5"})
    info = read_info(tmp_path / "run")
    assert (info["status"], info["seed"], info["server"]) == ("running", 7, {"version": "0.5"})
    assert info["versions"]["numpy"] == np.__version__
    writer.finish("failed", Accounting(), error="it broke")
    info = read_info(tmp_path / "run")
    assert (info["status"], info["error"], info["accounting"]["taken"]) == ("failed", "it broke", 0)


async def test_metrics_have_one_line_a_batch(tmp_path: Path) -> None:
    """metrics.jsonl holds the manager's numbers of each batch."""
    await store_run(tmp_path / "run", batches=3)
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["batch"] for line in lines] == [0, 1, 2]


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    """A folder with a run is refused, with the option that replaces it; nothing in it changes."""
    writer = RunWriter(tmp_path / "run", {"seed": 1})
    writer.on_group(group(0, "dropped", "r"))
    with pytest.raises(ConfigError, match=r"--out: got '.*run'; .* has run.json, dropped.jsonl. --overwrite"):
        RunWriter(tmp_path / "run", {"seed": 2})
    assert read_info(tmp_path / "run")["seed"] == 1


def test_overwriting_leaves_nothing_of_the_old_run(tmp_path: Path) -> None:
    """With overwrite the old run's files are removed, and other files in the folder stay."""
    writer = RunWriter(tmp_path / "run")
    writer.on_group(group(0, "dropped", "r"))
    writer.write_batch(group(1).samples, {})
    writer.finish("stopped")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    RunWriter(tmp_path / "run", overwrite=True)
    assert list(load_run(tmp_path / "run", "all")) == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "notes.txt", "run.json"]


_LIVE = """
import sys
from pathlib import Path
from rollouts.runs.journal import Journal
from rollouts.runs.writer import RunWriter

holder = RunWriter(sys.argv[2]) if sys.argv[1] == "writer" else Journal(Path(sys.argv[2]) / "journal")
print("live", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("holder", ["writer", "journal"])
def test_a_run_that_another_process_writes_is_not_overwritten(tmp_path: Path, holder: str) -> None:
    """Refused before a file is removed, while either its writer or its journal is open; free when that process dies."""
    run = tmp_path / "run"
    line = [sys.executable, "-c", _LIVE, holder, str(run)]
    if holder == "journal":
        RunWriter(run).finish("stopped")
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "live\n"
        (run / "batches").mkdir()
        (run / "batches" / "batch-000000.jsonl").write_text("sealed")
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        for refused in (check_free, RunWriter):
            with pytest.raises(ConfigError, match=r"--out: got .*; expected a run that no other process is writing to"):
                refused(run, overwrite=True)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        process.kill()
    RunWriter(run, overwrite=True)
    assert not (run / "batches").exists()


def test_a_run_that_this_process_writes_is_not_overwritten(tmp_path: Path) -> None:
    """Its sealed batch and the next one stay; after it finishes, the run can be replaced."""
    writer = RunWriter(tmp_path / "run", format="jsonl")
    writer.write_batch(group(1).samples, {})
    with pytest.raises(ConfigError, match="no other process is writing to"):
        RunWriter(tmp_path / "run", overwrite=True)
    writer.write_batch(group(2).samples, {})
    assert len(load_run(tmp_path / "run")) == 2 * len(group(1).samples)
    info = (tmp_path / "run" / "run.json").read_bytes()
    (tmp_path / "run" / "run.json").write_bytes(info[:9])  # it is read under the lock: the writer may change it
    with pytest.raises(ConfigError, match="no other process is writing to"):
        RunWriter.reopen(tmp_path / "run")
    writer.finish("finished")
    again = RunWriter.reopen(tmp_path / "run")
    with pytest.raises(ConfigError, match="no other process is writing to"):
        RunWriter(tmp_path / "run", overwrite=True)
    again.finish("finished")
    RunWriter(tmp_path / "run", overwrite=True)
    assert list(load_run(tmp_path / "run", "all")) == []


@pytest.mark.parametrize("inside", ["journal", "batches/new", "run.json"])
def test_a_run_is_not_written_into_the_files_of_another(tmp_path: Path, inside: str) -> None:
    """A run's folder may be in another run's folder, but not among its files."""
    RunWriter(tmp_path / "run").finish("finished")
    with pytest.raises(ConfigError, match=r"--out: got '.*'; expected a place outside the files of the run in '.*run'"):
        RunWriter(tmp_path / "run" / inside, overwrite=True)
    RunWriter(tmp_path / "run" / "rescored")


def test_a_file_is_no_folder_for_a_run(tmp_path: Path) -> None:
    """--out that names a file is refused, also with overwrite."""
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="a file is there"):
        RunWriter(tmp_path / "run", overwrite=True)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    """The message contains the system's error."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out: got '.*run'; expected a folder that can be written to \(.*Errno"):
        RunWriter(tmp_path / "file" / "run")


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    """The message lists the formats."""
    with pytest.raises(ConfigError, match=r"--format: got 'csv'; expected \"jsonl\", \"parquet\" or \"auto\""):
        RunWriter(tmp_path / "run", format="csv")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_no_metadata_costs_a_group(tmp_path: Path, format: Format) -> None:
    """Metadata that JSON cannot hold (objects, half characters, huge integers, odd keys) is stored as text."""
    odd = {"path": Path("x"), "half": "\ud800", "huge": 2**70, ("a", 1): 1, "array": np.arange(2)}
    sample = Sample(tokens=[1], metadata=odd, label={1, 2})
    RunWriter(tmp_path / "run", format=format).write_batch([sample], {})
    (loaded,) = load_run(tmp_path / "run")
    assert loaded.metadata["array"] == [0, 1]
    assert loaded.metadata["half"] == "?"
    assert loaded.metadata["huge"] == str(2**70)


@pytest.mark.parametrize("format", FORMATS)
def test_no_text_of_a_sample_costs_a_batch(tmp_path: Path, format: Format) -> None:
    """Half a character in the texts of a generate function is stored as in metadata."""
    times = Timeline([("tool", "half \ud800", 1.0, 2.0)])
    odd = Sample(tokens=[1], loss_mask=[1], rollout_log_probs=[0], response="half \ud800", seat="a\ud800", times=times)
    odd.versions = [VersionSpan("v\ud800", 0, 1)]
    RunWriter(tmp_path / "run", format=format).write_batch([odd], {})
    (loaded,) = load_run(tmp_path / "run")
    assert (loaded.response, loaded.seat, loaded.versions[0].version) == ("half ?", "a?", "v?")
    assert [span.name for span in loaded.times] == ["half ?"]


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    """The error has the folder and what was expected."""
    with pytest.raises(ConfigError, match=r"run: got '.*'; expected the folder of a run"):
        load_run(tmp_path)


def test_a_corrupted_line_is_named(tmp_path: Path) -> None:
    """A line that is not JSON is named by file and number."""
    writer = RunWriter(tmp_path / "run", format="jsonl")
    path = writer.write_batch(group(0).samples, {})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"batch-000000.jsonl, line 2: corrupted"):
        list(load_run(tmp_path / "run"))


def test_a_corrupted_batch_of_an_active_run_is_not_shorter(tmp_path: Path) -> None:
    """A batch appears whole: a line that is not sound is damage, and not the end of an append."""
    writer = RunWriter(tmp_path / "run", format="jsonl")
    path = writer.write_batch(group(0).samples, {})
    path.write_bytes(path.read_bytes().replace(b'"question 0"', b'"question 1"'))
    run = load_run(tmp_path / "run")
    assert len(run) == 2
    with pytest.raises(ConfigError, match=r"batch-000000.jsonl, line 1: corrupted"):
        run[0]


def test_a_corrupted_parquet_file_is_named(tmp_path: Path) -> None:
    """So is a Parquet file that was cut."""
    path = RunWriter(tmp_path / "run", format="parquet").write_batch(group(0).samples, {})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"batch-000000.parquet: corrupted"):
        list(load_run(tmp_path / "run"))


def test_a_row_that_is_no_sample_is_named(tmp_path: Path) -> None:
    """A line with a field too many is named by file and number."""
    writer = RunWriter(tmp_path / "run")
    writer.on_group(group(0, "dropped", "r"))
    path = tmp_path / "run" / "dropped.jsonl"
    edit_line(path, 0, lambda row: row.update(rewards=row.pop("reward")))
    with pytest.raises(ConfigError, match=r"dropped.jsonl, line 1: not a sample .*'rewards'"):
        list(load_run(tmp_path / "run", "dropped"))


def test_an_unknown_outcome_is_refused(tmp_path: Path) -> None:
    """The message lists the outcomes."""
    RunWriter(tmp_path / "run")
    with pytest.raises(ConfigError, match="outcome: got 'lost'"):
        load_run(tmp_path / "run", "lost")  # type: ignore[arg-type]


def test_a_group_that_became_too_old_moves_from_kept_to_dropped(tmp_path: Path) -> None:
    """A group is accepted, then dropped: it is stored once, with the reason."""
    writer = RunWriter(tmp_path / "run", format="jsonl")
    writer.on_group(group(0))
    writer.on_group(group(1))
    writer.on_group(group(0, "dropped", "too old"))
    writer.finish("stopped")
    assert {row.data["group_index"] for row in read_rows(tmp_path / "run", "unbatched")} == {1}
    assert {(row.data["group_index"], row.data["reason"]) for row in read_rows(tmp_path / "run", "dropped")} == {
        (0, "too old")
    }
