"""The cost of HTTP for leases: CPU and bytes of a sample, for a trainer that takes groups and acknowledges them.

Service and client are in this process, so that the CPU of both counts: encoding, sending, receiving, and decoding by
the client's own code. In the process of the leases, the same groups are taken and acknowledged without HTTP. Bytes are
those of the messages over those of the samples' records in a journal.
"""

from __future__ import annotations

import argparse
import functools
import gc
import tempfile
import time
from pathlib import Path

import anyio
import anyio.to_thread

from rollouts.dtypes import Prompt
from rollouts.runs.record_bytes import Columns, packed
from rollouts.service import Leases, Rollouts
from rollouts.service.server import Service, serving
from rollouts.training import Sample
from scripts.benches.dispatch import sample_of_four_turns

__all__ = ["bench_service", "service_options"]

_N = 8


def _groups(count: int) -> dict[int, list[Sample]]:
    prompts = [
        [Prompt("question", group_index=group, index=group * _N + member) for member in range(_N)]
        for group in range(count)
    ]
    return {group: [sample_of_four_turns(prompt) for prompt in members] for group, members in enumerate(prompts)}


async def _here(leases: Leases, size: int) -> None:
    while leases.ready:
        lease = await leases.take(size)
        assert lease is not None
        assert len([sample.reward for sample in lease.samples]) == size * _N
        await leases.acknowledge(lease.token)


def _over_http(service: Rollouts, size: int) -> int:
    received = 0
    while (batch := service.take(size)) is not None:
        received += len(batch.body)
        assert len([sample.reward for sample in batch.samples]) == size * _N
        batch.ack()
    return received


async def _measure(options: argparse.Namespace, folder: Path) -> dict[str, float | int | str]:
    groups = _groups(options.groups)
    samples = [sample for group in groups.values() for sample in group]
    stored = sum(len(part) for one in samples for part in packed({"sample": one.fields_to_dict()}, Columns.of(one)))
    here: list[float] = []
    over_http: list[float] = []
    wall: list[float] = []
    received = 0
    for number in range(options.rounds):
        for times, is_http in ((here, False), (over_http, True)):
            with Leases(folder / f"{number}-{is_http}", groups_in_work=options.groups) as leases:
                leases.restore(groups)
                async with serving(Service(leases)) as url:
                    gc.collect()
                    began, at = time.process_time(), time.perf_counter()
                    if is_http:
                        with Rollouts(url) as service:
                            received = await anyio.to_thread.run_sync(_over_http, service, options.lease)
                        wall.append(time.perf_counter() - at)
                    else:
                        await _here(leases, options.lease)
                    times.append(1000 * (time.process_time() - began) / len(samples))
    added = min(over_http) - min(here)
    return {
        "samples": len(samples),
        "KB a sample": stored / len(samples) / 1000,
        "here, CPU ms": min(here),
        "over HTTP, CPU ms": min(over_http),
        "added, CPU ms": added,
        "at most 0.3": "yes" if added <= 0.3 else "NO",
        "bytes over the journal's": received / stored,
        "at most 1.01": "yes" if received <= 1.01 * stored else "NO",
        "MB/s": received / min(wall) / 1e6,
    }


def bench_service(options: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """Leases over HTTP against leases in the same process: CPU and bytes of a sample."""
    with tempfile.TemporaryDirectory() as folder:
        return [anyio.run(functools.partial(_measure, options, Path(folder)))]


def service_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=256, help="of 8 samples (default: %(default)s)")
    parser.add_argument("--lease", type=int, default=32, help="groups of a lease (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the best counts (default: %(default)s)")
