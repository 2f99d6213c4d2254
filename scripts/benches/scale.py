"""Many trajectories in flight in one process, until all finish, against a stub server in its own process.

The server answers the first request of each trajectory only when all of them have arrived, so that the number in flight
is exact; after that, replies arrive at random times, each within ``--spread`` seconds. Batch, journal and mask
checks are on.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.to_thread

from rollouts.dtypes import Endpoint, Limits, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SimulatedUser
from rollouts.observability import LoopLag
from rollouts.recipe import Recipe
from rollouts.renderer import renderer_for
from rollouts.runs.run import run
from rollouts.runs.start import begin
from rollouts.runs.writer import RunWriter
from rollouts.testing.server import Request, StubServer
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from scripts.benches.pauses import LongestTurn, resident_mb

__all__ = ["bench_scale", "scale_options"]


async def _serve(reply: list[int], trajectories: int, spread: float, pipe: Connection) -> None:
    arrived = anyio.Event()
    rng = random.Random(0)
    seen = 0

    async def wait(request: Request) -> None:
        nonlocal seen
        seen += 1
        server.requests.clear()  # long and unused
        if seen == trajectories:
            arrived.set()
        await arrived.wait()
        await anyio.sleep(rng.uniform(0, spread))

    async with StubServer(lambda ids, params: reply, latency=wait) as server:
        pipe.send(server.url)
        await anyio.to_thread.run_sync(pipe.recv)
        pipe.send(server.most_live)


def _server(reply: list[int], trajectories: int, spread: float, pipe: Connection) -> None:
    _raise_file_limit()
    anyio.run(_serve, reply, trajectories, spread, pipe)


def _raise_file_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _user(conversation: object) -> str:
    return "And then?"


def _reward(sample: Sample) -> float:
    return float(len(sample) % 2)


async def _play(url: str, options: argparse.Namespace, folder: Path) -> dict[str, float | int | str]:
    endpoint = Endpoint(
        model=str(DEMO_MODEL), base_url=url, sampling=SamplingParams(max_new_tokens=256), request_seconds=3600
    )

    async def reward(sample: Sample) -> float:  # async, so that no threads are measured
        return _reward(sample)

    generate_fn = functools.partial(
        generate_rollout_batch,
        environment_cls=functools.partial(SimulatedUser, _user),
        endpoint=endpoint,
        tokenizer=endpoint.model,
        limits=Limits(max_turns=options.turns, episode_seconds=3600),
    )
    n = 8
    config = RolloutConfig(
        batch_size=options.trajectories // n,
        n_samples_per_prompt=n,
        over_sampling_factor=1.0,
        generate_fn=generate_fn,
        reward_fn=reward,
    )
    recipe = Recipe(
        name="scale",
        config=config,
        data_buffer=DataBuffer([f"question {number}" for number in range(options.trajectories // n)], epochs=1),
        endpoint=endpoint,
        tokenizer=endpoint.model,
        environment_cls=functools.partial(SimulatedUser, _user),
    )
    renderer_for(endpoint.model)
    writer = RunWriter(folder, recipe.describe(), format="jsonl")
    run_journal = begin(folder, recipe.describe(), recipe.data_buffer)
    lag, before, peak, longest = LoopLag(0.01, kept=1_000_000), resident_mb(), 0.0, LongestTurn()

    async def watch(manager: AsyncRolloutManager) -> None:
        nonlocal peak
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lag.run)
            tasks.start_soon(longest.run)
            while True:
                peak = max(peak, resident_mb())
                await anyio.sleep(0.25)

    began, cpu = time.perf_counter(), time.process_time()
    with run_journal.journal:
        result = await run(recipe, writer, run_journal=run_journal, watch=watch)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if result.error is not None:
        raise result.error
    played = result.run_metrics.rollouts
    return {
        "trajectories": played,
        "in flight at once": 0,
        "turns": played * options.turns,
        "seconds": seconds,
        "CPU ms a turn": 1000 * cpu / (played * options.turns),
        "memory, MB": peak,
        "KB a trajectory": 1000 * (peak - before) / played,
        "lag p50, ms": 1000 * lag.quantile(0.5),
        "lag p99, ms": 1000 * lag.quantile(0.99),
        "lag max, ms": 1000 * lag.longest,
        "longest pause, CPU ms": 1000 * longest.seconds,
        "all there": "yes" if played == options.trajectories == result.accounting.in_batch * n else "NO",
    }


def bench_scale(options: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """Trajectories in flight in one process, to the end: time, memory and lag of the loop, journal on."""
    _raise_file_limit()
    renderer = renderer_for(str(DEMO_MODEL))
    reply = [*renderer.encode("This is what I have to say to that. " * 3).tolist(), renderer.stop_token_ids[0]]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_server, args=(reply, options.trajectories, options.spread, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(120):
            raise SystemExit("the server did not start within 120 s")
        with tempfile.TemporaryDirectory() as folder:
            row = anyio.run(_play, ours.recv(), options, Path(folder) / "run")
        ours.send(None)
        row["in flight at once"] = ours.recv()
    finally:
        process.terminate()
        process.join(10)
    return [row]


def scale_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trajectories", type=int, default=10_000, help="a multiple of 8 (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="of each (default: %(default)s)")
    parser.add_argument(
        "--spread", type=float, default=30.0, help="seconds that a reply takes at most (default: %(default)s)"
    )
