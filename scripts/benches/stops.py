"""Lag of the event loop while many long replies arrive at once."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import anyio
import attrs
import numpy as np

from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.dtypes import Endpoint, Limits, SamplingParams
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer import Renderer
from rollouts.testing.canned import Canned, canned_server
from rollouts.testing.latency import Latency
from rollouts.training import generate_rollout_batch
from scripts.benches.growth import _allow_files
from scripts.benches.lines import Line
from scripts.benches.workloads import Play, Workload

__all__ = ["stops"]

MANY = 1024


def stops(renderer: Renderer, rounds: int) -> Iterator[Line]:
    """The 99th percentile of the loop's lag, with 1,024 replies of 4,096 tokens within a second."""
    _allow_files(2 * MANY + 256)
    play = Play.of(Workload(turns=1, reply=4096, prompt=200, samples=MANY, in_flight=MANY), renderer)
    canned = Canned([play.reply], latency=Latency(1.0, sigma=0.3))
    worst: dict[str, float] = {}
    values = []
    with canned_server(canned) as url:
        anyio.run(_lags, attrs.evolve(play, prompts=play.prompts[:32]), url)
        for _ in range(rounds):
            with calm_collector():
                lags = np.array(anyio.run(_lags, play, url)) * 1000
            values.append(float(np.quantile(lags, 0.99)))
            worst = {"longest ms": float(lags.max()), "median ms": float(np.median(lags))}
    yield Line.of("loop", "ms that the loop is late, p99", values, 20.0, details=worst)


async def _lags(play: Play, url: str) -> list[float]:
    """Seconds by which a heartbeat of a millisecond was late."""
    lags: list[float] = []

    async def beat() -> None:
        while True:
            began = time.perf_counter()
            await anyio.sleep(0.001)
            lags.append(time.perf_counter() - began - 0.001)

    async with SGLangPolicy(Endpoint(base_url=url), vocab_size=play.renderer.vocab_size) as policy:
        run = functools.partial(
            generate_rollout_batch,
            environment_cls=play.environment_cls,
            endpoint=Endpoint(base_url=url),
            tokenizer=play.renderer,
            limits=Limits(max_turns=2),
            sampling=SamplingParams(max_new_tokens=play.workload.reply),
            policy=policy,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat)
            await run(play.prompts)
            tasks.cancel_scope.cancel()
    return lags
