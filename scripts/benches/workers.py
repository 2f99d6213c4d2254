"""What worker processes give: samples per second with one and with two, and what each sample costs the one parent.

The parent's CPU time per sample is the serial part (Amdahl): with enough cores, workers add throughput until the parent
is full. Episodes are calculator turns against the canned server, with so much CPU work of an environment's own in each
turn as ``--work`` says; servers' time counts in the wall time of a machine with few cores, and nowhere else.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import attrs

from rollouts.distributed.workers import in_processes
from rollouts.dtypes import Endpoint, Limits, Message, SamplingParams
from rollouts.environments.base import StepResult
from rollouts.testing.canned import canned_server
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from rollouts.training.journal import Journal
from rollouts.training.ledger import Ledger
from scripts.benches.peers import REPLY, TURNS, Calculator, Job, reward
from scripts.benches.workloads import default_tokenizer

__all__ = ["bench_workers", "workers_options"]

Row = dict[str, float | int | str]
_N = 8
_TICKS = os.sysconf("SC_CLK_TCK")
_CORES = os.cpu_count() or 1


class Worker(Calculator):
    """A calculator that computes for so long in each turn, on the event loop, as environments do."""

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
    """In each worker."""
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
class Window:
    """Some batches."""

    samples: int
    wall: float
    parent: float
    workers: float
    messages: int
    bytes: int


def _cpu(pid: int) -> float:
    """Of a process that lives."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _prompts() -> Iterator[str]:
    return (f"Problem {number}: what is (2 + 2) * 2?" for number in itertools.count())


async def _play(factory: Any, count: int, options: argparse.Namespace, folder: Path) -> Window:
    buffer = DataBuffer(list(itertools.islice(_prompts(), options.groups * (options.batches + 4))))
    with Journal(folder / "journal") as journal:
        async with in_processes(factory, count) as workers:
            pids = [one.pid or 0 for one in multiprocessing.active_children() if one.name.startswith("worker")]
            config = workers.config(factory())
            async with AsyncRolloutManager(config, buffer, ledger=Ledger(journal)) as manager:
                await manager.generate_batch()  # to warm up
                wall, parent, there = time.perf_counter(), time.process_time(), sum(map(_cpu, pids))
                messages, size, rollouts = workers.messages, workers.bytes, workers.rollouts
                for _ in range(options.batches):
                    await manager.generate_batch()
                    await journal.sync()
                return Window(
                    samples=workers.rollouts - rollouts,
                    wall=time.perf_counter() - wall,
                    parent=time.process_time() - parent,
                    workers=sum(map(_cpu, pids)) - there,
                    messages=workers.messages - messages,
                    bytes=workers.bytes - size,
                )


def bench_workers(options: argparse.Namespace) -> list[Row]:
    """Samples per second with worker processes, and the share of a sample's CPU time that is the parent's."""
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
    def median(of: Any) -> float:
        return statistics.median(map(of, windows))

    speeds = [(one.samples / one.wall) / (base.samples / base.wall) for one, base in zip(windows, first, strict=True)]
    parent = median(lambda one: 1000 * one.parent / one.samples)
    workers = median(lambda one: 1000 * one.workers / one.samples)
    serial = median(lambda one: one.parent / (one.parent + one.workers))
    return {
        "work a turn, ms": f"{work:g}",
        "workers": str(count),
        "samples/s": median(lambda one: one.samples / one.wall),
        "times the first": f"{statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})",
        "worker's ms/sample": workers,
        "parent's": parent,
        "its share": serial,
        "workers that fill it": workers / parent,
        "messages/sample": median(lambda one: one.messages / one.samples),
        "KB/sample": median(lambda one: one.bytes / one.samples / 1000),
        f"as many as the {_CORES} cores": "yes" if workers / parent >= _CORES else "NO",
    }


def workers_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="(default: %(default)s)")
    parser.add_argument(
        "--work", type=float, nargs="+", default=[0.0, 5.0], help="CPU ms of the environment's own, a turn"
    )
    parser.add_argument("--groups", type=int, default=16, help="of a batch (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=4, help="of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--tokenizer", help="folder or name (default: Qwen3's where the tests' assets are)")
