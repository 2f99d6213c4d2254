"""A run on two worker processes, one of which is stopped for a while (SIGSTOP) and continues.

The batches of the time before, during and after the stop are counted. A run loses nothing if its accounting adds up,
no group failed, and ``verify`` finds no violation.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.to_thread
import attrs

from rollouts.distributed import in_processes
from rollouts.runs.run import Stop
from rollouts.runs.verify import verify_run
from rollouts.testing.replies import Request
from rollouts.testing.server import StubServer
from rollouts.training import RolloutConfig
from rollouts.training.manager import AsyncRolloutManager
from scripts.faults.harness import endpoint_at, in_process, sound_reply, stored
from scripts.faults.user_code import recipe_of

__all__ = ["config_of", "stopped_worker"]

_REPLY_SECONDS = 0.1
"""Of every request, so that the speed is that of the rollouts in flight, not of the processors."""
_UNDISTURBED_SECONDS = 10.0


def config_of(url: str) -> RolloutConfig:
    """The config of each process."""
    return recipe_of(endpoint_at(url), batches=10**6, batch_size=4, over_sampling_factor=2.0).config


def serve(pipe: Connection) -> None:
    """A stub that replies late, until the pipe gets a message."""

    async def late(request: Request) -> None:
        await anyio.sleep(_REPLY_SECONDS)

    async def main() -> None:
        async with StubServer(sound_reply(random.Random(1)), latency=late) as server:
            pipe.send(server.url)
            await anyio.to_thread.run_sync(pipe.recv)

    anyio.run(main)


async def _play(url: str, folder: Path, seconds: float) -> bool:
    stop = Stop()
    recipe = recipe_of(endpoint_at(url), batches=10**6)
    spans = {"before": _UNDISTURBED_SECONDS, "stopped": seconds, "after": _UNDISTURBED_SECONDS}
    speeds: dict[str, float] = {}
    others = set(multiprocessing.active_children())
    async with in_processes(functools.partial(config_of, url), workers=2) as workers:
        victim = min(set(multiprocessing.active_children()) - others, key=lambda process: process.pid or 0)
        assert victim.pid is not None

        async def watch(manager: AsyncRolloutManager) -> None:
            assert victim.pid is not None
            while not manager.batches:  # noqa: ASYNC110 - no event
                await anyio.sleep(0.05)
            for name, length in spans.items():
                if name != "before":
                    os.kill(victim.pid, signal.SIGSTOP if name == "stopped" else signal.SIGCONT)
                began, first = anyio.current_time(), manager.batches
                await anyio.sleep(length)
                speeds[name] = (manager.batches - first) / (anyio.current_time() - began)
            stop.ask()

        recipe = attrs.evolve(recipe, config=workers.config(config_of(url)))
        try:
            result = await stored(recipe, folder, stop=stop, watch=watch)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        given_away, deaths = workers.given_away, workers.deaths
    report = await anyio.to_thread.run_sync(verify_run, folder)
    print("batches a second: " + ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items()))
    print(f"{result.batches} batches; {result.accounting}")
    print(f"rollouts given to the other worker: {given_away}; deaths: {deaths}; verify: {len(report.violations)}")
    sound = result.status == "stopped" and report.ok and not result.accounting.failed and not deaths
    return sound and speeds["stopped"] >= speeds["before"] / 2


def stopped_worker(folder: Path, seconds: float) -> bool:
    """Play and print; returns whether nothing was lost and the other worker kept at least half of the speed."""
    with in_process(serve) as server:
        return anyio.run(_play, server.recv(), folder / "run", seconds)
