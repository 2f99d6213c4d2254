"""Throughput of worker processes: samples per second with none, one and two, and the parent's cost of a sample.

The parent's CPU time per sample is the serial part (Amdahl): with enough cores, workers add throughput until the parent
is saturated. Episodes are calculator turns against the canned server, with ``--work`` milliseconds of CPU work of the
environment in each turn.

Wall times depend on the machine: other processes, the parent and the server use its cores. Therefore the kernel's
counts are read too: how long each worker ran, and how long it waited for a core (``/proc/PID/schedstat``); for the rest
of the time it was idle. With a core each, the workers would have run for both: that speed, ``busy share x workers / CPU
seconds a sample``, is printed next to the measured one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs

from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.distributed.processes import in_processes
from rollouts.dtypes import Endpoint, Limits, Message, Prompt, SamplingParams
from rollouts.environments.base import StepResult
from rollouts.runs.journal import Journal
from rollouts.runs.run_journal import RunJournal
from rollouts.testing.canned import canned_server
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from scripts.benches.peers_job import REPLY, TURNS, Calculator, Job, reward
from scripts.benches.workloads import default_tokenizer

__all__ = ["bench_workers", "workers_options"]

Row = dict[str, float | int | str]
_N = 8
_CORES = os.cpu_count() or 1


class Worker(Calculator):
    """A calculator that computes for a given time in each turn, on the event loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def step(self, reply: Message) -> StepResult:
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            hashlib.sha256(bytes(4096)).digest()
        return await super().step(reply)


def scored(sample: Sample) -> float:
    return reward(sample.messages[-1]["content"]) + float((sample.index or 0) % 2)


def make_config(url: str, tokenizer: str, work: float, groups: int) -> RolloutConfig:
    """The config of each worker."""
    generate_fn = functools.partial(
        generate_rollout_batch,
        environment_cls=functools.partial(Worker, work),
        endpoint=Endpoint(base_url=url),
        tokenizer=tokenizer,
        limits=Limits(max_turns=TURNS + 2),
        sampling=SamplingParams(max_new_tokens=REPLY),
    )

    async def reward_fn(sample: Sample) -> float:  # async: it takes microseconds
        return scored(sample)

    return RolloutConfig(
        batch_size=groups,
        n_samples_per_prompt=_N,
        over_sampling_factor=2,
        generate_fn=generate_fn,
        reward_fn=reward_fn,
    )


@attrs.frozen
class Spent:
    """Seconds of processes so far."""

    cpu: float
    """CPU time of all their threads."""
    loop: float
    """CPU time of the threads of their event loops."""
    in_line: float
    """Time that those threads waited for a core."""

    @classmethod
    def by(cls, pids: Sequence[int]) -> Spent:
        """The times of running processes."""
        cpu = loop = in_line = 0.0
        for pid in pids:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                ran, waited, _ = (int(text) / 1e9 for text in (thread / "schedstat").read_text().split())
                cpu += ran
                if int(thread.name) == pid:
                    loop, in_line = loop + ran, in_line + waited
        return cls(cpu, loop, in_line)

    def since(self, before: Spent) -> Spent:
        return Spent(self.cpu - before.cpu, self.loop - before.loop, self.in_line - before.in_line)


@attrs.frozen
class Window:
    """Some batches."""

    samples: int
    wall: float
    parent: float
    """CPU seconds of the process with the manager, if there are workers."""
    players: int
    """Processes that generate: the workers, or the only one."""
    played: Spent
    messages: int
    bytes: int

    @property
    def speed(self) -> float:
        return self.samples / self.wall

    @property
    def busy(self) -> float:
        """Share of the time in which a process computed, or waited for a core."""
        return (self.played.loop + self.played.in_line) / (self.wall * self.players)

    @property
    def free_speed(self) -> float:
        """Samples per second with a core for each process."""
        return self.busy * self.players / (self.played.loop / self.samples)


def _prompts() -> Iterator[str]:
    return (f"Problem {number}: what is (2 + 2) * 2?" for number in itertools.count())


async def _play(factory: Any, count: int, options: argparse.Namespace, folder: Path) -> Window:
    buffer = DataBuffer(list(itertools.islice(_prompts(), options.groups * (options.batches + 4))))
    with calm_collector(), Journal(folder / "journal") as journal:
        async with contextlib.AsyncExitStack() as stack:
            config, workers, pids, ended = factory(), None, [os.getpid()], itertools.count()
            if count:
                workers = await stack.enter_async_context(in_processes(factory, count))
                config = workers.config(config)
                pids = [one.pid or 0 for one in multiprocessing.active_children() if one.name.startswith("worker")]
            play = config.generate_fn

            async def counted(prompts: Sequence[Prompt]) -> Sequence[Sample]:
                samples: Sequence[Sample] = await play(prompts)
                next(ended)
                return samples

            config = attrs.evolve(config, generate_fn=counted)
            manager = await stack.enter_async_context(
                AsyncRolloutManager(config, buffer, rollout_log=RunJournal(journal))
            )
            await manager.generate_batch()  # to warm up
            first = next(ended)
            messages, size = (workers.messages, workers.bytes) if workers else (0, 0)
            wall, parent, there = time.perf_counter(), time.process_time(), Spent.by(pids)
            for _ in range(options.batches):
                await manager.generate_batch()
                await journal.sync()
            return Window(
                samples=next(ended) - first - 1,
                wall=time.perf_counter() - wall,
                parent=time.process_time() - parent,
                players=len(pids),
                played=Spent.by(pids).since(there),
                messages=workers.messages - messages if workers else 0,
                bytes=workers.bytes - size if workers else 0,
            )


def bench_workers(options: argparse.Namespace) -> list[Row]:
    """Samples per second with worker processes, and the parent's CPU time of a sample."""
    tokenizer = str(options.tokenizer or default_tokenizer())
    job = Job.of(tokenizer)
    rows: list[Row] = []
    with canned_server(job.canned) as url, tempfile.TemporaryDirectory() as folder:
        for work in options.work:
            windows: dict[int, list[Window]] = {count: [] for count in options.workers}
            for number, count in itertools.product(range(options.rounds), options.workers):
                path = Path(folder) / f"{work:g}-{number}-{count}"
                path.mkdir()
                factory = functools.partial(make_config, url, tokenizer, work / 1000, options.groups)
                windows[count].append(anyio.run(_play, factory, count, options, path))
                print(f"work {work:g} ms, round {number}, {count} workers: {windows[count][-1]}", file=sys.stderr)
            first = windows[options.workers[0]]
            rows += [_row(work, count, found, first) for count, found in windows.items()]
    return rows


def _row(work: float, count: int, windows: list[Window], first: list[Window]) -> Row:
    def median(of: Callable[[Window], float]) -> float:
        return statistics.median(map(of, windows))

    def ratios(of: Callable[[Window], float]) -> list[float]:
        return [of(one) / of(base) for one, base in zip(windows, first, strict=True)]

    measured, free = ratios(lambda one: one.speed), ratios(lambda one: one.free_speed)
    row: Row = {
        "work a turn, ms": f"{work:g}",
        "workers": str(count),
        "samples/s": median(lambda one: one.speed),
        "times the first": f"{statistics.median(measured):.2f} ({min(measured):.2f} to {max(measured):.2f})",
        "busy": median(lambda one: one.busy),
        "times, a core each": f"{statistics.median(free):.2f} ({min(free):.2f} to {max(free):.2f})",
        "ms/sample": median(lambda one: 1000 * one.played.cpu / one.samples),
    }
    if not count:
        return row
    filled = median(lambda one: one.played.cpu / one.parent)
    return {
        **row,
        "parent's": median(lambda one: 1000 * one.parent / one.samples),
        "workers that fill it": filled,
        "samples/message": median(lambda one: one.samples / one.messages),
        "KB/sample": median(lambda one: one.bytes / one.samples / 1000),
        f"as many as the {_CORES} cores": "yes" if filled >= _CORES else "NO",
    }


def workers_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="0 for none (default: %(default)s)")
    parser.add_argument(
        "--work", type=float, nargs="+", default=[0.0, 20.0], help="CPU ms of the environment's own, a turn"
    )
    parser.add_argument("--groups", type=int, default=8, help="of a batch (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=3, help="of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--tokenizer", help="folder or name (default: Qwen3's where the tests' assets are)")
