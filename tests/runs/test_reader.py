"""Reading a stored run: in order, by index, by group; memory contains only the requested samples."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import pytest

from rollouts.errors import ConfigError
from rollouts.runs.folder import read_rows
from rollouts.runs.reader import load_run
from rollouts.runs.writer import Format
from tests.stored_runs import store_long_run, store_run

FORMATS: list[Format] = ["jsonl", "parquet"]


@pytest.mark.parametrize("format", FORMATS)
async def test_random_access_gives_what_reading_through_gives(tmp_path: Path, format: Format) -> None:
    """By index, from the end, by slice, and by group; in every file of the run."""
    await store_run(tmp_path / "run", format=format)
    run = load_run(tmp_path / "run", "all")
    samples = [row.sample() for row in read_rows(tmp_path / "run", "all")]
    assert len(run) == len(samples) > 24
    assert [run[number] for number in range(len(run))] == samples
    assert (run[-1], run[-len(run)]) == (samples[-1], samples[0])
    assert run[3:20:5] == samples[3:20:5]
    assert run[::-7] == samples[::-7]
    groups = {number: list(each) for number, each in itertools.groupby(samples, lambda sample: sample.group_index)}
    assert run.group_indices == list(groups)
    assert {number: run.group(number) for number in reversed(groups)} == groups
    assert list(run.groups()) == list(groups.values())


async def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A sample past the end is an IndexError, as of a list; a group names the run."""
    await store_run(tmp_path / "run")
    run = load_run(tmp_path / "run")
    for number in (len(run), -len(run) - 1):
        with pytest.raises(IndexError, match=f"has no sample {number}"):
            run[number]
    with pytest.raises(ConfigError, match=r"group: got 999; expected a group of <StoredSamples .*: kept, 24 samples"):
        run.group(999)


async def test_its_repr_is_worth_reading(tmp_path: Path) -> None:
    """It has folder, recipe, status and outcome, and reads no samples."""
    await store_run(tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert repr(run) == f"<StoredSamples {tmp_path / 'run'} (finished): kept, not counted yet>"
    assert len(run) == 24
    assert repr(run) == f"<StoredSamples {tmp_path / 'run'} (finished): kept, 24 samples in 6 groups>"


@pytest.mark.parametrize("format", FORMATS)
def test_reading_a_longer_run_takes_no_more_memory(tmp_path: Path, format: Format) -> None:
    """Memory for all samples, and for one group, with one batch and with four."""
    peaks = []
    for batches in (1, 4):
        path = tmp_path / str(batches)
        store_long_run(path, batches, format=format)
        tracemalloc.start()
        run = load_run(path)
        assert sum(1 for _ in run) == 24 * batches
        assert len(run.group(run.group_indices[-1])) == 4
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
