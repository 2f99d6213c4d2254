"""CPU time of the scheduler for a rollout, by file: the real manager, and rollouts that only wait on a virtual clock.

The generate function returns samples that were made before, as agents return them, after a lognormal number of virtual
seconds. Sampling at each millisecond of CPU time gives the shares, and the round with the least CPU time the total.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

import anyio
import numpy as np

import rollouts
from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.dtypes import Prompt, VersionSpan, frozen
from rollouts.planning.simulation import VirtualLoop
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, Status
from scripts.benches.calls import sampled

__all__ = ["bench_scheduler", "scheduler_options"]

Row = dict[str, float | int | str]
_N = 8
_PACKAGE = Path(rollouts.__file__).parent


def _made() -> Sample:
    """A sample as an agent returns it: packed columns and compact records."""
    columns = (np.arange(64, dtype=np.int32), np.arange(64) >= 32, np.zeros(64, np.float32))
    tokens, mask, logprobs = map(frozen, columns)
    sample = Sample(
        tokens=tokens,
        loss_mask=mask,
        rollout_log_probs=logprobs,
        versions=[VersionSpan("1", 32, 64)],
        status=Status.COMPLETED,
        reward=1.0,
    )
    return sample.compact_records(32, str)


async def _stream(in_flight: int, rollouts_wanted: int, found: collections.Counter[CodeType] | None) -> float:
    """Return the seconds of CPU for a rollout; ``found`` gets the functions that ran."""
    batches = max(4, rollouts_wanted // in_flight)
    made = iter([_made() for _ in range(in_flight * (batches + 5))])

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        await anyio.sleep(20 * random.Random(prompt.index).lognormvariate(0, 1))
        return [next(made)]

    config = RolloutConfig(
        batch_size=in_flight // _N,
        n_samples_per_prompt=_N,
        over_sampling_factor=3,
        in_flight=in_flight,
        generate_fn=generate,
        rollout_seconds=1e9,
    )
    with calm_collector():
        async with AsyncRolloutManager(config, DataBuffer(["prompt"])) as manager:
            manager.announce_version("1")
            stream = manager.stream()
            await anext(stream)
            before, began = manager.failures.sound, time.process_time()
            if found is None:
                for _ in range(batches):
                    await anext(stream)
            else:
                with sampled(found, lambda code: code):
                    for _ in range(batches):
                        await anext(stream)
            seconds = time.process_time() - began
            ended = manager.failures.sound - before
            await stream.aclose()
    return seconds / ended


def _run(in_flight: int, rollouts_wanted: int, found: collections.Counter[CodeType] | None) -> float:
    stream = functools.partial(_stream, in_flight, rollouts_wanted, found)
    return anyio.run(stream, backend_options={"loop_factory": VirtualLoop})


def bench_scheduler(options: argparse.Namespace) -> list[Row]:
    """Microseconds of CPU for a rollout at several numbers in flight, by file, and of the costliest functions."""
    by_code: dict[int, dict[str, float]] = {}
    for in_flight in options.in_flight:
        found: collections.Counter[CodeType] = collections.Counter()
        least = min(_run(in_flight, options.rollouts, None) for _ in range(options.rounds))
        for _ in range(options.rounds):
            _run(in_flight, options.rollouts, found)
        scale = 1e6 * least / found.total()
        costs = by_code[in_flight] = collections.defaultdict(float)
        for code, number in found.items():
            costs[_file_of(code)] += scale * number
            costs[f"{_file_of(code)}: {code.co_qualname}()"] += scale * number
        costs["together"] = 1e6 * least
    first = by_code[options.in_flight[0]]
    files = [name for name in first if "(" not in name]
    functions = [name for name in first if "(" in name]
    shown = itertools.chain(
        *(sorted(names, key=first.__getitem__)[: -1 - options.most : -1] for names in (files, functions))
    )
    return [
        {"part": name, **{f"{in_flight:,} in flight": costs[name] for in_flight, costs in by_code.items()}}
        for name in shown
    ]


def _file_of(code: CodeType) -> str:
    """A file of the package; other code by its library."""
    path = Path(code.co_filename)
    if path.is_relative_to(_PACKAGE):
        return str(path.relative_to(_PACKAGE))
    return next((part for part in ("anyio", "asyncio", "attr") if part in code.co_filename), "other")


def scheduler_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-flight", type=int, nargs="+", default=[192, 1024, 4096], help="(default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=4000, help="of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the least CPU counts (default: %(default)s)")
    parser.add_argument("--most", type=int, default=20, help="files and functions to print (default: %(default)s)")
