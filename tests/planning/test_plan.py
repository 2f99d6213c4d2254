"""Plans from measured or synthetic workloads."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts.commands import main
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.planning.plan import Given, measured, plan, shape
from rollouts.planning.simulation import Speed
from rollouts.runs.folder import read_rows
from rollouts.runs.writer import RunWriter
from tests.stored_runs import edit_line, some_sample, store_run


def _store(run: Path, **options: Any) -> None:
    """In a loop that ends: a plan starts its event loop."""
    anyio.run(functools.partial(store_run, run, **options))


def test_a_shape_is_read() -> None:
    """Constant, lognormal and bimodal."""
    rng = random.Random(0)
    assert shape("constant:2.5")(rng) == 2.5
    assert {shape("bimodal:1,9,0.5")(rng) for _ in range(50)} == {1.0, 9.0}
    drawn = sorted(shape("lognormal:10,1")(rng) for _ in range(2001))
    assert drawn[1000] == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("text", ["", "constant", "constant:0", "lognormal:1", "bimodal:1,2,3", "uniform:1,2"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    """The message lists the known shapes."""
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


def test_a_workload_is_that_of_the_run(tmp_path: Path) -> None:
    """Each group once, with its own seconds and outcome, before any comes again; but for the last to begin.

    Of those only the quick ones have ended: the others were in flight when the run was over, six groups of them.
    """
    run = tmp_path / "run"
    _store(run, batches=6)
    for file in ("dropped.jsonl", *(f"batches/batch-{number:06d}.jsonl" for number in range(6))):
        for line in range(len((run / file).read_bytes().splitlines())):
            edit_line(run / file, line, lambda row: row["metrics"].update(generation_seconds=1.0 + row["group_index"]))
    rows = [row for row in read_rows(run, "all") if row.outcome != "failed"]
    workload = measured([run])
    ended = {row.data["group_index"] for row in rows}
    groups = {group for group in ended if group <= max(ended) - 6}
    assert len(workload.groups) == len(groups) < len(ended)
    assert (workload.batch_size, workload.n) == (3, 4)
    kept = {row.data["group_index"] for row in rows if row.outcome in ("kept", "unbatched")} & groups
    assert workload.pass_rate == len(kept) / len(groups)
    drawn = sorted((workload.seconds(turn, 0), workload.passes(turn)) for turn in range(len(groups)))
    expected = sorted(
        (
            {row.data["group_index"]: row.data["metrics"].get("generation_seconds", 0.0) for row in rows}[group],
            group in kept,
        )
        for group in groups
    )
    assert expected == drawn


def test_a_rollout_takes_the_time_of_all_its_samples(tmp_path: Path) -> None:
    """Of its seats and branches: the seconds of the last alone would be a part of them."""
    config = {"batch_size": 1, "n_samples_per_prompt": 1, "over_sampling_factor": 1.0}
    writer = RunWriter(tmp_path / "run", {"config": config})
    samples = [some_sample(Prompt("play", group_index=0, index=0), seed) for seed in (0, 1)]
    for sample, seat, seconds in zip(samples, ["white", "black"], [2.0, 3.0], strict=True):
        sample.seat, sample.metrics = seat, {"generation_seconds": seconds, "environment_seconds": 1.0}
    writer.write_batch(samples, {})
    workload = measured([tmp_path / "run"])
    assert (workload.seconds(0, 0), workload.outside(0, 0)) == (5.0, 2.0)


def test_a_short_run_tells_all_that_it_has(tmp_path: Path) -> None:
    """With one batch, every ended group is used."""
    run = tmp_path / "run"
    _store(run, batches=1)
    for line in range(len((run / "batches/batch-000000.jsonl").read_bytes().splitlines())):
        edit_line(run / "batches/batch-000000.jsonl", line, lambda row: row["metrics"].update(generation_seconds=1.0))
    ended = {row.data["group_index"] for row in read_rows(run, "all") if row.outcome != "failed"}
    assert len(measured([run]).groups) == len(ended)


def _store_even_run(run: Path, factor: float, seconds: float) -> Path:
    """Every rollout samples ten tokens in ``seconds``, and every group is kept."""
    _store(run, over_sampling_factor=factor, filter_fn=lambda samples: True, fails=lambda prompt: False)
    for row in read_rows(run, "all"):
        assert row.outcome in ("kept", "unbatched")
    files = [*run.glob("batches/*.jsonl"), *run.glob("unbatched.jsonl")]
    for file in files:
        for line in range(len(file.read_bytes().splitlines())):

            def time_it(row: dict[str, Any]) -> None:
                row["completions"] = [{"start": 0, "stop": 10}]
                row["metrics"].update(generation_seconds=seconds)

            edit_line(file, line, time_it)
    return run


def test_runs_with_more_in_flight_tell_the_speed(tmp_path: Path) -> None:
    """Speed is measured at 12 and 24 rollouts at once, and extrapolated to fewer."""
    one = _store_even_run(tmp_path / "one", 1.0, 2.0)
    two = _store_even_run(tmp_path / "two", 2.0, 3.0)
    workload = measured([one, two])
    assert [workload.speed.expected.at(count) for count in (12, 24)] == pytest.approx([1, 2 / 3])
    assert workload.speed.expected.at(1) == pytest.approx(1 / (1 - 11 / 12 * 0.5))
    assert {workload.seconds(group, 0) for group in range(20)} == {2.0}
    alone = measured([one]).speed.expected
    assert [alone.at(count) for count in (1, 12, 24)] == pytest.approx([1, 1, 0.5])


@pytest.mark.parametrize(("seconds", "alone"), [(1.0, 1.0), (9.0, 12.0)])
def test_a_line_goes_no_further_than_a_server_can(tmp_path: Path, seconds: float, alone: float) -> None:
    """Alone no rollout is slower than among others, nor the server's throughput higher than with them."""
    one = _store_even_run(tmp_path / "one", 1.0, 2.0)
    two = _store_even_run(tmp_path / "two", 2.0, seconds)
    assert measured([one, two]).speed.expected.at(1) == pytest.approx(alone)


def test_equal_runs_are_one_measurement(tmp_path: Path) -> None:
    """Runs with equal sizes are averaged, as the machine may be faster in one of them."""
    fast = _store_even_run(tmp_path / "fast", 1.0, 1.0)
    slow = _store_even_run(tmp_path / "slow", 1.0, 3.0)
    workload = measured([fast, slow])
    assert {workload.seconds(group, 0) for group in range(20)} == {2.0}
    assert workload.speed.expected.at(12) == 1.0


def test_a_run_without_times_is_refused(tmp_path: Path) -> None:
    """It is refused; it does not count as taking no time."""
    _store(tmp_path / "run")
    with pytest.raises(ConfigError, match="whose rollouts took time"):
        measured([tmp_path / "run"])


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The output has the options, the fastest, and more servers."""
    line = ["plan", "--latency", "bimodal:1,9,0.2", "--batch-size", "4", "--rollouts", "2", "--factors", "1,2"]
    assert main([*line, "--pass-rate", "0.5", "--servers", "1,2"]) == 0
    output = capsys.readouterr().out
    assert "fastest: over_sampling_factor=" in output
    assert "more servers" in output
    assert main(["plan"]) == 2
