"""Predicted and measured time to fill a batch, for three shapes of latency and for the embedded engine.

A stub server responds after a random time of the given shape. The engine runs the demo model in its own process, on
calculator episodes, where all rollouts in flight share its speed. The plan's only input is short runs with factors 1
and 3; it predicts the time of other factors, which are measured in the same rounds. All rounds together are one
prediction and one measurement, because the speed of the machine may change between two runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import random
import statistics
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import engine_process
from rollouts.environments import CalculatorEnvironment, SingleTurnEnvironment
from rollouts.environments.calculator import calculator_prompts
from rollouts.planning.plan import Option, measured, plan, shape
from rollouts.recipe import Recipe
from rollouts.runs.run import run
from rollouts.runs.writer import RunWriter
from rollouts.testing.server import Request, StubServer
from rollouts.training import DataBuffer, RolloutConfig, Sample, generate_rollout_batch

__all__ = ["SHAPES", "TOLERANCE", "bench_plan", "plan_options"]

SHAPES = ("constant:1.5", "lognormal:1,0.8", "bimodal:0.8,4,0.2")
ENGINE = "engine"
TOLERANCE = 0.2
Row = dict[str, float | int | str]
_INPUT_FACTORS = (1.0, 3.0)
"""Factors of the runs that are the plan's input."""
_TIMES = {ENGINE: 2}
"""Multiplier of batches and rounds: the engine fills a batch in a second, on shared cores."""
_PROMPTS = 50
"""Number of prompts: so few that each run uses all of them, and nearly has the filter's true pass rate."""
_PASSES = 7
"""Prompts of every ten that the filter keeps."""


def _is_kept(samples: Sequence[Sample]) -> bool:
    return int(samples[0].label) % 10 < _PASSES


def _reward(sample: Sample) -> float:
    return 1.0


@contextlib.asynccontextmanager
async def _server(latency: str, seed: str) -> AsyncIterator[str]:
    if latency == ENGINE:
        with tempfile.TemporaryDirectory(prefix="rollouts-bench-") as folder:
            async with engine_process(DEMO_MODEL, Path(folder) / "engine.log", slots=128) as engine:
                yield engine.url
        return
    draw, rng = shape(latency), random.Random(seed)

    async def wait(request: Request) -> None:
        await anyio.sleep(draw(rng))

    async with StubServer(lambda ids, params: [1, 2, 3], latency=wait) as server:
        yield server.url


async def _run(
    latency: str, factor: float, number: int, batches: int, folder: Path, options: argparse.Namespace
) -> float:
    """Seconds of a batch, without the first. Each run has its own latencies and order of prompts."""
    seed = f"{latency}/{factor}/{number}"
    environment_cls = CalculatorEnvironment if latency == ENGINE else SingleTurnEnvironment
    async with _server(latency, seed) as url:
        sampling = SamplingParams(max_new_tokens=64 if latency == ENGINE else 8)
        endpoint = Endpoint(model=str(DEMO_MODEL), base_url=url, sampling=sampling)
        generate_fn = functools.partial(
            generate_rollout_batch, environment_cls=environment_cls, endpoint=endpoint, tokenizer=endpoint.model
        )
        config = RolloutConfig(
            batch_size=options.batch_size,
            n_samples_per_prompt=options.n,
            over_sampling_factor=factor,
            generate_fn=generate_fn,
            reward_fn=_reward,
            filter_fn=_is_kept,
        )
        problems = calculator_prompts(0)
        rows = [{"prompt": next(problems).prompt, "label": label} for label in range(_PROMPTS)]
        recipe = Recipe(
            name="plan",
            config=config,
            data_buffer=DataBuffer(rows, seed=zlib.crc32(seed.encode())),
            endpoint=endpoint,
            tokenizer=endpoint.model,
            environment_cls=environment_cls,
            batches=batches,
        )
        result = await run(recipe, RunWriter(folder, recipe.describe(), format="jsonl"))
    if result.error is not None:
        raise result.error
    return statistics.fmean(metrics["seconds"] for metrics in result.batch_metrics[1:])


def bench_plan(options: argparse.Namespace) -> list[Row]:
    """Seconds to fill a batch, as predicted by ``rollouts plan`` from runs with two factors, and as measured."""
    rows: list[Row] = []
    for latency in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            inputs: list[Path] = []
            seconds: dict[float, list[float]] = {factor: [] for factor in options.factors}
            times = _TIMES.get(latency, 1)
            for number in range(options.rounds * times):  # alternating, so that all run on the same machine state
                for factor in (*_INPUT_FACTORS, *options.factors):
                    path = Path(folder) / f"{number}-{factor:g}"
                    batches = (options.input_batches if factor in _INPUT_FACTORS else options.batches) * times
                    measured_seconds = anyio.run(_run, latency, factor, number, batches, path, options)
                    print(f"{latency}, round {number}, factor {factor:g}: {measured_seconds:.3g} s", file=sys.stderr)
                    if factor in _INPUT_FACTORS:
                        inputs.append(path)
                    else:
                        seconds[factor].append(measured_seconds)
            workload = measured(inputs)
            for factor in options.factors:
                found = plan(
                    workload,
                    batch_size=options.batch_size,
                    n=options.n,
                    speed=workload.speed,
                    batches=20,
                    factors=[factor],
                    servers=(),
                )
                (option,) = found.options
                rows.append(_row(latency, option, seconds[factor]))
    return rows


def _row(latency: str, option: Option, measured_seconds: list[float]) -> Row:
    seconds = statistics.fmean(measured_seconds)
    ratio = option.seconds / seconds
    spread = f"{min(measured_seconds):.3g} to {max(measured_seconds):.3g} ({len(measured_seconds)})"
    good = abs(ratio - 1) <= TOLERANCE
    return {
        "latency": latency,
        "factor": f"{option.factor:g}",
        "predicted, s": option.seconds,
        "measured, s": seconds,
        "lowest to highest (rounds)": spread,
        "error of the mean, %": f"{100 * _error_of_mean(measured_seconds) / seconds:.0f}",
        "predicted/measured": ratio,
        "within 20 %": "yes" if good else "NO",
    }


def _error_of_mean(values: list[float]) -> float:
    """The standard error of the mean; NaN for a single run."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=(*SHAPES, ENGINE), help="of latency, or engine (default: all)")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.5, 2.0], help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="groups (default: %(default)s)")
    parser.add_argument("--n", type=int, default=4, help="rollouts in a group (default: %(default)s)")
    parser.add_argument("--input-batches", type=int, default=5, help="batches of each input run (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=8, help="of each predicted run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="twice that for the engine (default: %(default)s)")
