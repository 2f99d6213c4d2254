"""Predicted and measured time to fill a batch, for three shapes of latency.

A stub server answers each request after a time drawn from the shape. Two short runs (factors 1 and 3) are all that the
plan is told; then it predicts what other factors take, and those are run.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment
from rollouts.planning import Option, measured, plan, shape
from rollouts.recipe import Recipe
from rollouts.running import run
from rollouts.testing.server import Request, StubServer
from rollouts.training import DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from rollouts.training.sinks import RunWriter

__all__ = ["SHAPES", "TOLERANCE", "bench_plan", "plan_options"]

SHAPES = ("constant:1.5", "lognormal:1,0.8", "bimodal:0.8,4,0.2")
TOLERANCE = 0.2
_PASSES = 7
"""Prompts of every ten that the filter keeps."""


def _is_kept(samples: Sequence[Sample]) -> bool:
    return int(samples[0].label) % 10 < _PASSES


def _reward(sample: Sample) -> float:
    return 1.0


async def _run(latency: str, factor: float, batches: int, folder: Path, options: argparse.Namespace) -> float:
    """Seconds of a batch, without the first."""
    draw, rng = shape(latency), random.Random(f"{latency}/{factor}")

    async def wait(request: Request) -> None:
        await anyio.sleep(draw(rng))

    async with StubServer(lambda ids, params: [1, 2, 3], latency=wait) as server:
        endpoint = Endpoint(model=str(DEMO_MODEL), base_url=server.url, sampling=SamplingParams(max_new_tokens=8))
        generate_fn = functools.partial(
            generate_rollout_batch,
            environment_cls=SingleTurnEnvironment,
            endpoint=endpoint,
            tokenizer=endpoint.model,
        )
        config = RolloutConfig(
            batch_size=options.batch_size,
            n_samples_per_prompt=options.n,
            over_sampling_factor=factor,
            generate_fn=generate_fn,
            reward_fn=_reward,
            filter_fn=_is_kept,
        )
        labels = list(range(1000))
        random.Random(0).shuffle(labels)
        rows = [{"prompt": f"question {label}", "label": label} for label in labels]
        recipe = Recipe(
            name="plan",
            config=config,
            data_buffer=DataBuffer(rows),
            endpoint=endpoint,
            tokenizer=endpoint.model,
            environment_cls=SingleTurnEnvironment,
            batches=batches,
        )
        result = await run(recipe, RunWriter(folder, recipe.describe(), format="jsonl"))
    if result.error is not None:
        raise result.error
    return statistics.fmean(metrics["seconds"] for metrics in result.batch_metrics[1:])


def bench_plan(options: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """Seconds to fill a batch as ``rollouts plan`` predicts them from two short runs, and as they are measured."""
    rows: list[dict[str, float | int | str]] = []
    for latency in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            told = [Path(folder) / "one", Path(folder) / "three"]
            for path, factor in zip(told, (1.0, 3.0), strict=True):
                anyio.run(_run, latency, factor, options.told, path, options)
            workload = measured(told)
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
                path = Path(folder) / f"factor-{factor:g}"
                seconds = anyio.run(_run, latency, factor, options.batches, path, options)
                rows.append(_row(latency, option, seconds))
    return rows


def _row(latency: str, option: Option, seconds: float) -> dict[str, float | int | str]:
    ratio = option.seconds / seconds
    good = abs(ratio - 1) <= TOLERANCE
    return {
        "latency": latency,
        "factor": f"{option.factor:g}",
        "predicted, s": option.seconds,
        "measured, s": seconds,
        "predicted/measured": ratio,
        "within 20 %": "yes" if good else "NO",
    }


def plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="of latency (default: %(default)s)")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.5, 2.0], help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="groups (default: %(default)s)")
    parser.add_argument("--n", type=int, default=4, help="rollouts in a group (default: %(default)s)")
    parser.add_argument("--told", type=int, default=6, help="batches of each run that is told (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=16, help="of each run that is predicted (default: %(default)s)")
