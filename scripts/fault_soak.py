"""A long run in which each reply, episode, reward, filter and generate call fails with the same small probability.

The server runs in a process of its own. Every kind of fault of ``scripts.fault_kinds`` occurs, except those that take
more than a second or leave something behind for good. Every 500 batches, and at 1,000, one line has the memory of this
process, its Python objects, its file descriptors, its tasks and threads, and the lag of its event loop.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.to_thread
import attrs

from rollouts.concurrency.boundary import abandoned
from rollouts.runs.verify import verify_run
from rollouts.testing.replies import Answer, Fault
from rollouts.testing.server import StubServer
from rollouts.training.manager import AsyncRolloutManager
from scripts.fault_kinds import CODE, REPLIES, CodeFault, Place, recipe_of, sound_reply, stored

__all__ = ["soak"]

GROWTH_MB = 15.0
"""Maximum growth of the memory in the second half of the run. In the first half caches fill: the texts of requests are
kept for a minute, in which a quick machine plays 4,000 batches."""
_LINES = 10


@attrs.frozen
class Reading:
    """The state of this process after a number of batches."""

    batches: int
    seconds: float
    megabytes: float
    objects: int
    descriptors: int
    tasks: int
    threads: int
    lag: float
    """Largest lag of the event loop in milliseconds since the last reading."""

    def __str__(self) -> str:
        return (
            f"{self.batches:>6} batches {self.seconds:6.0f} s: {self.megabytes:6.1f} MB, {self.objects} objects, "
            f"{self.descriptors} descriptors, {self.tasks} tasks, {self.threads} threads, lag {self.lag:.0f} ms"
        )


def megabytes() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def serve(pipe: Connection, share: float) -> None:
    """A stub whose replies fail with a probability, until the pipe gets a message; then send the number of requests."""
    rng = random.Random(1)
    kinds = [each.fault for each in REPLIES if each.fault != "hang"]

    async def main() -> None:
        served = 0

        def faults() -> Iterator[Fault | Answer]:
            nonlocal served
            while True:
                served += 1
                server.requests.clear()
                yield rng.choice(kinds) if rng.random() < share else "none"

        server = StubServer(sound_reply(rng), faults=faults())
        async with server:
            pipe.send(server.url)
            await anyio.to_thread.run_sync(pipe.recv)
            pipe.send(served)

    anyio.run(main)


async def _play(url: str, folder: Path, batches: int, share: float) -> bool:
    rng = random.Random(2)
    quick = [fault for fault in CODE if not fault.slow and not fault.ends]
    met: Counter[str] = Counter()

    def choose(places: Sequence[Place], group: int | None) -> CodeFault | None:
        if rng.random() >= share:
            return None
        fault = rng.choice([each for each in quick if each.place in places])
        met[fault.place] += 1
        return fault

    recipe = recipe_of(url, choose, batches=batches, batch_size=1, max_attempts=2)
    readings: list[Reading] = []
    began = time.monotonic()

    async def watch(manager: AsyncRolloutManager) -> None:
        late, before, step = 0.0, time.monotonic(), max(1, batches // _LINES)
        while True:
            await anyio.sleep(0.05)
            now = time.monotonic()
            late, before = max(late, 1e3 * (now - before - 0.05)), now
            if manager.batches >= step * (len(readings) + 1):
                gc.collect()
                readings.append(
                    Reading(
                        manager.batches,
                        now - began,
                        megabytes(),
                        len(gc.get_objects()),
                        len(os.listdir("/proc/self/fd")),
                        len(asyncio.all_tasks()),
                        threading.active_count(),
                        late,
                    )
                )
                print(readings[-1], flush=True)
                late, before = 0.0, time.monotonic()

    result = await stored(recipe, folder, watch=watch)
    result.accounting.check()
    report = await anyio.to_thread.run_sync(verify_run, folder)
    print(f"{result.status} after {result.seconds:.0f} s: {result.accounting}")
    print(f"faults of user code: {dict(sorted(met.items()))}")
    print(f"verify: {len(report.violations)} violations; {len(abandoned())} abandoned threads and coroutines")
    for violation in report.violations[:5]:
        print(f"  {violation}")
    if result.error is not None:
        print(f"error: {result.error}")
    settled = [reading for reading in readings if reading.batches >= batches / 2]
    grown = settled[-1].megabytes - settled[0].megabytes
    spans = {
        name: (min(values), max(values))
        for name in ("descriptors", "tasks", "threads")
        for values in [[getattr(reading, name) for reading in settled]]
    }
    print(f"in the second half: {grown:+.1f} MB (at most {GROWTH_MB:g}); " + str(spans))
    return result.status == "finished" and report.ok and grown <= GROWTH_MB


def soak(folder: Path, batches: int, share: float = 0.05) -> int:
    """Play and print; returns the exit code."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, share), daemon=True)
    server.start()
    try:
        good = anyio.run(_play, here.recv(), folder / "run", batches, share)
        here.send("stop")
        print(f"{here.recv()} requests")
    finally:
        server.kill()
        server.join()
    return 0 if good else 1
