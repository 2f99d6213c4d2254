"""Plans: made of what runs measured, or of what is given."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.planning import Given, measured, plan, shape
from rollouts.simulation import Speed
from rollouts.training.run_folder import read_rows
from tests.stored_runs import edit_line, store_run


def test_a_shape_is_read() -> None:
    """Constant, lognormal and bimodal."""
    rng = random.Random(0)
    assert shape("constant:2.5")(rng) == 2.5
    assert {shape("bimodal:1,9,0.5")(rng) for _ in range(50)} == {1.0, 9.0}
    drawn = sorted(shape("lognormal:10,1")(rng) for _ in range(2001))
    assert drawn[1000] == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("text", ["", "constant", "constant:0", "lognormal:1", "bimodal:1,2,3", "uniform:1,2"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    """With those that there are."""
    with pytest.raises(ConfigError, match=r"latency: got .*expected constant:S"):
        shape(text)


def test_the_plan_names_the_soonest() -> None:
    """With a filter and a long tail, more groups in work fill a batch sooner, at the price of prompts."""
    found = plan(
        Given(shape("lognormal:10,1"), pass_rate=0.6),
        batch_size=8,
        n=4,
        speed=Speed(),
        factors=(1.0, 2.0),
        servers=(1, 4),
    )
    one, two = found.options
    assert found.best is two
    assert two.seconds < one.seconds
    assert two.started_per_kept > one.started_per_kept
    assert [option.servers for option in found.scaled] == [1, 4]


async def test_a_workload_is_that_of_the_run(tmp_path: Path) -> None:
    """Each group once, with its own seconds and outcome, before any comes again; but for the last to begin.

    Of those only the quick ones have ended: the others were in flight when the run was over, six groups of them.
    """
    run = tmp_path / "run"
    await store_run(run, batches=3)
    for file in ("dropped.jsonl", *(f"batches/batch-{number:06d}.jsonl" for number in range(3))):
        for line in range(len((run / file).read_bytes().splitlines())):
            edit_line(run / file, line, lambda row: row["metrics"].update(generation_seconds=1.0 + row["group_index"]))
    rows = [row for row in read_rows(run, "all") if row.place != "failed"]
    workload = measured([run])
    ended = {row.data["group_index"] for row in rows}
    groups = {group for group in ended if group <= max(ended) - 6}
    assert len(workload.groups) == len(groups) < len(ended)
    assert (workload.batch_size, workload.n) == (3, 4)
    kept = {row.data["group_index"] for row in rows if row.place in ("kept", "unbatched")} & groups
    assert workload.pass_rate == len(kept) / len(groups)
    drawn = sorted((workload.seconds(turn, 0), workload.passes(turn)) for turn in range(len(groups)))
    told = sorted(
        (
            {row.data["group_index"]: row.data["metrics"].get("generation_seconds", 0.0) for row in rows}[group],
            group in kept,
        )
        for group in groups
    )
    assert drawn == told


async def test_a_short_run_tells_all_that_it_has(tmp_path: Path) -> None:
    """A batch and no more: what ended is all there is to know."""
    run = tmp_path / "run"
    await store_run(run, batches=1)
    for line in range(len((run / "batches/batch-000000.jsonl").read_bytes().splitlines())):
        edit_line(run / "batches/batch-000000.jsonl", line, lambda row: row["metrics"].update(generation_seconds=1.0))
    ended = {row.data["group_index"] for row in read_rows(run, "all") if row.place != "failed"}
    assert len(measured([run]).groups) == len(ended)


async def test_a_run_without_times_is_refused(tmp_path: Path) -> None:
    """Rather than planned for as one that takes none."""
    await store_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="whose rollouts took time"):
        measured([tmp_path / "run"])


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Its options, the soonest, and more servers."""
    line = ["plan", "--latency", "bimodal:1,9,0.2", "--batch-size", "4", "--n", "2", "--factors", "1,2"]
    assert main([*line, "--pass-rate", "0.5", "--servers", "1,2"]) == 0
    told = capsys.readouterr().out
    assert "soonest: over_sampling_factor=" in told
    assert "more servers" in told
    assert main(["plan"]) == 2
