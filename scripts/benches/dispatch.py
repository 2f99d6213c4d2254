"""Many rollouts outstanding at simulated workers: what the parent pays for each, and how long its loop stands still.

The links are in this process. Each keeps the numbers of its orders and nothing else, and answers the oldest ones, 32 in
a message, each with the same prebuilt sample, while more rollouts are outstanding than wanted, less one batch: groups
that wait for their batch are not outstanding. Dispatcher, manager, checks, journal and files are real. The links' own
CPU is subtracted. The memory of a rollout outstanding is measured before the first result; the peak includes results.
After the last batch, the run returns all that are outstanding: that CPU is theirs, not that of results.
"""

from __future__ import annotations

import argparse
import functools
import gc
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np

from rollouts.distributed.dispatch import Dispatcher
from rollouts.distributed.messages import sample_records
from rollouts.dtypes import Endpoint, Prompt, VersionSpan
from rollouts.recipe import Recipe
from rollouts.runs.record_bytes import Columns, framed, read_framed
from rollouts.runs.run import run
from rollouts.runs.start import begin
from rollouts.runs.writer import RunWriter
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from rollouts.trajectory import CompletionRecord
from scripts.benches.pauses import LongestTurn, resident_mb

__all__ = ["bench_dispatch", "dispatch_options", "sample_of_four_turns"]

_N = 8
_IN_A_MESSAGE = 32
_TOKENS = 2_400
"""Of a sample: 32 KB in a message, with its texts."""
_IDS = np.arange(_TOKENS, dtype=np.int32) % 500


def sample_of_four_turns(prompt: Prompt) -> Sample:
    """A finished sample of four turns."""
    replies = [(start + 100, start + 600) for start in range(0, _TOKENS, 600)]
    mask = np.zeros(_TOKENS, bool)
    for start, stop in replies:
        mask[start:stop] = True
    sample = Sample(prompt.prompt, "word " * 400, _IDS, mask, float((prompt.index or 0) % 2))
    sample.group_index, sample.index, sample.label, sample.metadata = prompt.group_index, prompt.index, None, {}
    sample.rollout_log_probs = np.where(mask, -0.5, 0).astype(np.float32)
    sample.versions = [VersionSpan("v0", *reply) for reply in replies]
    sample.completions = [CompletionRecord("r", *reply, "stop", 0, 8, 0.5) for reply in replies]
    sample.messages = [{"role": role, "content": "word " * 200} for role in ("user", "assistant") * len(replies)]
    return sample


@attrs.define(eq=False)
class _Load:
    """The workers together."""

    outstanding: int
    fewest: int
    """While no more wait, none is answered."""
    waiting: int = 0
    is_full: bool = False
    """Whether all were outstanding once."""
    arrived: anyio.Event = attrs.field(factory=anyio.Event)
    cpu: float = 0.0
    """Seconds that the links themselves took."""
    submitted: float = 0.0
    """CPU seconds of the process, less theirs, when all were outstanding."""
    resident: float = 0.0
    """Resident memory then, MB."""
    results: int = 0
    sealed: tuple[float, int] = (0.0, 0)
    """CPU seconds as in ``submitted``, and results, when the last batch was written."""

    def take(self, count: int) -> None:
        self.waiting += count
        if self.waiting >= self.outstanding and not self.is_full:
            self.is_full, self.submitted, self.resident = True, time.process_time() - self.cpu, resident_mb()
        if self.is_full:
            self.arrived.set()

    async def arrival(self) -> None:
        if self.arrived.is_set():
            self.arrived = anyio.Event()
        await self.arrived.wait()


@attrs.define(eq=False)
class _Link:
    """A worker that plays nothing."""

    load: _Load
    fields: Mapping[str, Any]
    columns: Columns
    """The record of each result, except for its number."""
    orders: deque[int] = attrs.field(factory=deque)

    async def send(self, message: bytes) -> None:
        began = time.thread_time()
        requests, _ = pickle.loads(message)
        self.orders.extend(pickle.loads(request).number for request in requests)
        self.load.cpu += time.thread_time() - began
        self.load.take(len(requests))

    async def receive(self) -> bytes:
        load = self.load
        while not load.is_full or not self.orders or load.waiting <= load.fewest:
            await load.arrival()
        await anyio.sleep(0.005)  # a message of a worker arrives when the loop is free
        began = time.thread_time()
        taken = [self.orders.popleft() for _ in range(min(_IN_A_MESSAGE, len(self.orders)))]
        message = b"".join(framed({**self.fields, "number": number}, self.columns) for number in taken)
        load.waiting -= len(taken)
        load.results += len(taken)
        load.cpu += time.thread_time() - began
        return message

    async def beat(self) -> None:
        await anyio.sleep(0.5)

    async def aclose(self) -> None:
        return


async def _generate(prompts: Any) -> list[Sample]:
    raise AssertionError("the workers play")


def _next_batch(load: _Load, lowest: list[float], _: Mapping[str, float]) -> None:
    lowest.append(float("inf"))
    load.sealed = time.process_time() - load.cpu, load.results


async def _play(options: argparse.Namespace, folder: Path) -> dict[str, float | int | str]:
    batch = options.outstanding // _N // options.factor
    load = _Load(options.outstanding, options.outstanding - batch * _N - options.workers * _IN_A_MESSAGE)
    prompt = Prompt("question")
    fields, columns = next(read_framed(sample_records(0, prompt, [sample_of_four_turns(prompt)])))
    assert columns is not None
    config = RolloutConfig(
        batch_size=batch,
        n_samples_per_prompt=_N,
        over_sampling_factor=options.factor,
        generate_fn=_generate,
        group_seconds=36000,
        rollout_seconds=3600,
    )
    collections: list[tuple[int, float]] = []
    began_collection = 0.0

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal began_collection
        if phase == "start":
            began_collection = time.thread_time()
        else:
            collections.append((info["generation"], time.thread_time() - began_collection))

    before, peak, lowest, longest = resident_mb(), 0.0, [0.0], LongestTurn()

    async def watch(manager: AsyncRolloutManager) -> None:
        nonlocal peak
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(longest.run)
            while True:
                now = resident_mb()
                peak, lowest[-1] = max(peak, now), min(lowest[-1], now)
                await anyio.sleep(0.05)  # the heap of a batch is back only until the next one arrives

    async def connect(number: int) -> _Link:
        return _Link(load, fields, columns)

    async with Dispatcher(connect, options.workers, silent_seconds=60.0) as workers:
        prompts = [f"question {number}" for number in range(batch * 4)]
        recipe = Recipe(
            name="dispatch",
            config=workers.config(config),
            data_buffer=DataBuffer(prompts),
            endpoint=Endpoint(model="none"),
            tokenizer="none",
            batches=options.batches,
        )
        writer = RunWriter(folder, recipe.describe(), format="jsonl")
        run_journal = begin(folder, recipe.describe(), recipe.data_buffer)
        gc.callbacks.append(collected)
        began = time.process_time()
        with run_journal.journal:
            on_batch = functools.partial(_next_batch, load, lowest)
            result = await run(recipe, writer, run_journal=run_journal, watch=watch, on_batch=on_batch)
        cpu = time.process_time() - load.cpu
        gc.callbacks.remove(collected)
    if result.error is not None:
        raise result.error
    kept = resident_mb()
    cycles = gc.collect()
    full = [seconds for generation, seconds in collections if generation == 2]
    return {
        "outstanding": options.outstanding,
        "results": load.results,
        "CPU ms a submit": 1000 * (load.submitted - began) / options.outstanding,
        "CPU ms a result": 1000 * (load.sealed[0] - load.submitted) / load.sealed[1],
        "CPU ms a rollout returned": 1000 * (cpu - load.sealed[0]) / options.outstanding,
        "links, ms a result": 1000 * load.cpu / load.results,
        "memory before, MB": before,
        "KB a rollout outstanding": 1000 * (load.resident - before) / options.outstanding,
        "before the first result, MB": load.resident,
        "lowest before the last batch, MB": lowest[-2],
        "peak, MB": peak,
        "after the run, MB": kept,
        "objects in cycles": cycles,
        "full collections": len(full),
        "longest of them, CPU ms": 1000 * max(full, default=0.0),
        "longest pause, CPU ms": 1000 * longest.seconds,
        "given away": workers.given_away + workers.deaths,
    }


def bench_dispatch(options: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """Rollouts outstanding at simulated workers: CPU of a submit and of a result, pauses, memory."""
    whole = _N * options.factor
    if options.outstanding % whole:
        raise SystemExit(f"--outstanding: got {options.outstanding}; expected a multiple of {whole}: whole groups wait")
    with tempfile.TemporaryDirectory() as folder:
        return [anyio.run(functools.partial(_play, options, Path(folder) / "run"))]


def dispatch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--outstanding", type=int, default=20_000, help="rollouts (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--factor", type=int, default=4, help="over-sampling factor (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=4, help="(default: %(default)s)")
