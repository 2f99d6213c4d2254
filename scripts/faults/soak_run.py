"""A long run in which each reply, episode, reward, filter and generate call fails with the same small probability.

The server runs in a separate process. Every fault of ``replies.py`` and ``user_code.py`` occurs, except the faults that
take more than a second or leave something behind for good. Ten lines have the memory of this process, its Python
objects, its file descriptors, its tasks and threads, and the lag of its event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import tempfile
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
from scripts.faults.harness import endpoint_at, in_process, sound_reply, stored
from scripts.faults.replies import REPLIES
from scripts.faults.user_code import CODE, CodeFault, Place, recipe_of

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


def serve(share: float, pipe: Connection) -> None:
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

    recipe = recipe_of(endpoint_at(url), choose, batches=batches, batch_size=1, max_attempts=2)
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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/faults/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("batches", type=int, metavar="N", help="how many batches")
    parser.add_argument("--share", type=float, default=0.05, help="probability of a fault (0.05)")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="soak_") as folder,
        in_process(serve, args.share) as server,
    ):
        good = anyio.run(_play, server.recv(), Path(folder) / "run", args.batches, args.share)
        server.send("stop")
        print(f"{server.recv()} requests")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
