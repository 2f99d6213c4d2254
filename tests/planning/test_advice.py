"""The advice of a plan, tried: the runs that it predicts are made, with a model whose rollouts share its speed.

The real manager makes them and the real writer stores them, on a simulated clock: a busy machine changes nothing.
"""

from __future__ import annotations

import functools
import io
import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from rollouts.dtypes import Prompt
from rollouts.planning.plan import MeasuredSpeed, Plan, measured, plan, show_plan, spread
from rollouts.planning.simulation import VirtualLoop
from rollouts.runs.writer import RunWriter
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from rollouts.training.types import Group
from tests.stored_runs import some_sample

BATCHES, BATCH_SIZE, N = 12, 4, 2
CAPACITY = 2.0
"""Rollouts that the model serves at full speed; more of them share it, as on an engine that is saturated."""
STEP = 0.25
FACTORS = (1.0, 1.5, 3.0)


class SharedModel:
    """Serves all rollouts at once, step by step; each needs 2 to 6 seconds of it, drawn by its index."""

    def __init__(self) -> None:
        self.left: dict[int, float] = {}
        self.stepped = anyio.Event()

    async def serve(self) -> None:
        while True:
            await anyio.sleep(STEP)
            for index in self.left:
                self.left[index] -= STEP * min(1.0, CAPACITY / len(self.left))
            self.stepped.set()
            self.stepped = anyio.Event()

    async def generate(self, prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.index is not None
        began = anyio.current_time()
        self.left[prompt.index] = random.Random(prompt.index).choice((2.0, 3.0, 6.0))
        while self.left[prompt.index] > 0:
            await self.stepped.wait()
        del self.left[prompt.index]
        sample = some_sample(prompt, 0)
        sample.metrics["generation_seconds"] = anyio.current_time() - began
        return [sample]


async def is_kept(samples: Sequence[Sample]) -> bool:
    return samples[0].label % 10 < 6


async def make_run(folder: Path, factor: float) -> float:
    """Make and store a run; returns the mean seconds of its batches, without the first."""
    model = SharedModel()
    config = RolloutConfig(
        batch_size=BATCH_SIZE,
        n_samples_per_prompt=N,
        over_sampling_factor=factor,
        generate_fn=model.generate,
        filter_fn=is_kept,
    )
    writer = RunWriter(folder, {"config": config.describe()}, format="jsonl")
    data = DataBuffer([{"prompt": "?", "label": number} for number in range(50)], seed=0)

    async def store(group: Group) -> None:  # async: a thread would not follow the clock
        writer.on_group(group)

    ends = [anyio.current_time()]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(model.serve)
        async with AsyncRolloutManager(config, data, on_group=store) as manager:
            for _ in range(BATCHES):
                writer.write_batch(await manager.generate_batch(), manager.metrics, manager.accounting)
                ends.append(anyio.current_time())
        writer.finish("finished", manager.accounting)
        tasks.cancel_scope.cancel()
    return statistics.fmean(end - start for start, end in itertools.pairwise(ends[1:]))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[float, Path], Mapping[float, float]]:
    """The runs by their factor, and their seconds."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {factor: folder / f"{factor:g}" for factor in FACTORS}
    run = functools.partial(anyio.run, make_run, backend_options={"loop_factory": VirtualLoop})
    return runs, {factor: run(path, factor) for factor, path in runs.items()}


@pytest.fixture(scope="module")
def from_one(made: tuple[Mapping[float, Path], Mapping[float, float]]) -> tuple[Plan, MeasuredSpeed]:
    """The plan from the run with the factor 1.5."""
    return planned([made[0][1.5]])


def planned(runs: Sequence[Path]) -> tuple[Plan, MeasuredSpeed]:
    workload = measured(runs)
    found = plan(workload, batch_size=BATCH_SIZE, n=N, speed=workload.speed, factors=FACTORS, servers=(), batches=12)
    return found, workload.speed


def test_from_one_run_only_its_own_factor_is_recommended(
    made: tuple[Mapping[float, Path], Mapping[float, float]], from_one: tuple[Plan, MeasuredSpeed]
) -> None:
    """A factor with more or fewer rollouts in flight is not advised, and the seconds of the run are predicted."""
    found, seconds = from_one[0], made[1]
    assert [option.measured for option in found.options] == [False, True, False]
    assert found.best.factor == 1.5
    assert found.best.seconds == pytest.approx(seconds[1.5], rel=0.35)


def test_what_was_not_measured_lies_between_the_limits(
    made: tuple[Mapping[float, Path], Mapping[float, float]], from_one: tuple[Plan, MeasuredSpeed]
) -> None:
    """The seconds of a run with a factor that is not measured lie between the two that the plan gives."""
    for option in from_one[0].options:
        assert 0.7 * option.fewest_seconds < made[1][option.factor] < 1.4 * option.seconds


def test_the_advice_from_two_runs_holds_when_it_is_tried(
    made: tuple[Mapping[float, Path], Mapping[float, float]],
) -> None:
    """A factor between two runs has one prediction, which its run confirms; the recommended one is the fastest."""
    runs, seconds = made
    found, _ = planned([runs[1.0], runs[3.0]])
    assert all(option.measured for option in found.options)
    option = next(option for option in found.options if option.factor == 1.5)
    assert option.seconds == pytest.approx(seconds[1.5], rel=0.35)
    assert seconds[found.best.factor] < 1.15 * min(seconds.values())


def test_what_was_not_measured_is_marked(from_one: tuple[Plan, MeasuredSpeed]) -> None:
    """An option that no run covers has a range instead of one number, and the plan says how to measure it."""
    output = io.StringIO()
    show_plan(from_one[0], Console(file=output, width=80), from_one[1])
    lines = output.getvalue().splitlines()
    assert "fastest: over_sampling_factor=1.5, no limit: " in output.getvalue()
    assert [line.split()[-1] for line in lines if line.strip().startswith(("1 ", "1.5 ", "3 "))] == ["no", "yes", "no"]
    assert any(line.startswith("The runs had 12 rollouts in flight.") for line in lines)
    assert any(
        line.endswith("To measure it, run the recipe with it and add that run: rollouts plan RUN OTHER_RUN")
        for line in lines
    )
    assert max(map(len, lines[:5])) <= 80


SLOTS, HEAVY_N = 48, 4


def make_heavy_run(folder: Path, factor: float, in_flight: int) -> tuple[float, float]:
    """Store a run of lognormal rollouts; returns the mean seconds and ages of its batches, without the first ones."""
    ages: list[int] = []
    ends: list[float] = []
    began: dict[int, int] = {}

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.group_index is not None
        began.setdefault(prompt.group_index, manager.batches)
        seconds = 20 * random.Random(f"heavy/{prompt.index}").lognormvariate(0, 1)
        await anyio.sleep(seconds)
        sample = some_sample(prompt, 0)
        sample.metrics["generation_seconds"] = seconds
        return [sample]

    config = RolloutConfig(
        batch_size=8,
        n_samples_per_prompt=HEAVY_N,
        over_sampling_factor=factor,
        in_flight=in_flight,
        generate_fn=generate,
        rollout_seconds=1e6,
    )
    writer = RunWriter(folder, {"config": config.describe()}, format="jsonl")

    async def store(group: Group) -> None:
        writer.on_group(group)

    data = DataBuffer([{"prompt": "?", "label": number} for number in range(50)], seed=0)
    manager = AsyncRolloutManager(config, data, on_group=store)

    async def run() -> None:
        async with manager:
            for number in range(60):
                samples = await manager.generate_batch()
                writer.write_batch(samples, manager.metrics, manager.accounting)
                if number >= 15:
                    ages.extend(number - began[sample.group_index or 0] for sample in samples)
                    ends.append(anyio.current_time())
            writer.finish("finished", manager.accounting)

    anyio.run(run, backend_options={"loop_factory": VirtualLoop})
    return (ends[-1] - ends[0]) / (len(ends) - 1), statistics.fmean(ages)


def test_a_heavy_tailed_run_with_slots_is_predicted(tmp_path: Path) -> None:
    """From a stored run of one factor, seconds and ages of that and of other factors are within 10 % of their runs."""
    made = {factor: make_heavy_run(tmp_path / f"{factor:g}", factor, SLOTS) for factor in (2.0, 3.0, 5.0)}
    workload = measured([tmp_path / "3"])
    assert workload.in_flight == SLOTS
    found = plan(
        workload,
        batch_size=8,
        n=HEAVY_N,
        speed=workload.speed,
        in_flight=SLOTS,
        factors=made,
        servers=(),
        batches=60,
    )
    for option in found.options:
        assert option.measured, "at most in_flight rollouts run, whatever the factor"
        assert option.seconds == pytest.approx(made[option.factor][0], rel=0.1)
        assert option.filled.age == pytest.approx(made[option.factor][1], rel=0.1)
    assert spread(workload, HEAVY_N) == pytest.approx(2.2, rel=0.15)
