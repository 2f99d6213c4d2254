"""Seconds a batch, age and bias of length by admission, on a virtual clock: the load of the machine has no effect.

The scheduler is the real manager; a rollout is a lognormal number of seconds, the same ones for every setting. The
trainer takes no time and announces a version for each batch. Lengths in batches are compared with those of all groups
that were taken from the data meanwhile: 1.00 is no bias.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
from collections.abc import Sequence

import anyio
import attrs

from rollouts.dtypes import VersionSpan
from rollouts.planning.simulation import VirtualLoop
from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample, Status
from rollouts.training.staleness import StalenessPolicy

__all__ = ["Job", "Outcome", "bench_slots", "slots_options", "stream"]

Row = dict[str, float | int | str]


@attrs.frozen
class Job:
    """The settings of one run."""

    sigma: float = 1.0
    """Standard deviation of the logarithm of a rollout's seconds; their median is 20."""
    n: int = 8
    factor: float = 1.5
    in_flight: int | None = None
    policy: StalenessPolicy = "drop"
    max_staleness: int | None = None
    rollouts: int = 128
    """In a batch."""
    warm_up: int = 20
    batches: int = 40
    seed: int = 0

    def seconds(self, index: int) -> float:
        return 20 * random.Random(f"{self.seed}/{index}").lognormvariate(0, self.sigma)

    def mean_seconds(self, groups: Sequence[int]) -> float:
        return statistics.fmean(
            self.seconds(index) for group in groups for index in range(group * self.n, (group + 1) * self.n)
        )


@attrs.frozen
class Outcome:
    """The figures of one run."""

    seconds: float
    """A batch."""
    alive: float
    """Mean rollouts that run."""
    peak: int
    age: float
    """Mean versions between the start of a group and its batch."""
    oldest: int
    bias: float
    """Mean seconds of a rollout in a batch, over those of all."""
    dropped: float
    """Share of the groups."""


async def _stream(job: Job) -> Outcome:
    alive: list[int] = [0, 0]
    began: dict[int, int] = {}

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.index is not None
        assert prompt.group_index is not None
        version = manager.staleness.current
        began.setdefault(prompt.group_index, version)
        alive[0] += 1
        alive[1] = max(alive)
        await anyio.sleep(job.seconds(prompt.index))
        alive[0] -= 1
        spans = [VersionSpan(str(version), 1, 2)]
        sample = Sample(tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0.0, -1.0], versions=spans)
        sample.status, sample.reward = Status.COMPLETED, 1.0
        return [sample]

    config = RolloutConfig(
        batch_size=job.rollouts // job.n,
        n_samples_per_prompt=job.n,
        over_sampling_factor=job.factor,
        in_flight=job.in_flight,
        generate_fn=generate,
        rollout_seconds=1e9,
        patience=1_000_000,
    )
    manager = AsyncRolloutManager(config, DataBuffer(["prompt"]))
    ends: list[float] = []
    running: list[float] = []
    batches: list[list[int]] = []
    ages: list[int] = []
    dropped: list[int] = []
    async with manager:
        manager.announce_version("1")
        batch_stream = manager.stream(max_staleness=job.max_staleness, policy=job.policy)
        for number in range(job.warm_up + job.batches):
            samples = await anext(batch_stream)
            if number >= job.warm_up:
                groups = [sample.group_index for sample in samples[:: job.n] if sample.group_index is not None]
                batches.append(groups)
                running.append(manager.metrics["slots/running"])
                ages += [manager.staleness.current - began[group] for group in groups]
            ends.append(anyio.current_time())
            dropped.append(manager.accounting.dropped)
            manager.announce_version(str(number + 2))
        await batch_stream.aclose()
    measured = ends[job.warm_up - 1 :]
    spans = [end - start for start, end in itertools.pairwise(measured)]
    kept = list(itertools.chain(*batches))
    lost = dropped[-1] - dropped[job.warm_up - 1]
    in_order = sorted(kept)
    window = range(in_order[len(kept) // 100], in_order[-1 - len(kept) // 100])  # without the tails of long groups
    return Outcome(
        seconds=statistics.fmean(spans),
        alive=sum(one * span for one, span in zip(running, spans, strict=True)) / sum(spans),
        peak=alive[1],
        age=statistics.fmean(ages),
        oldest=max(ages),
        bias=job.mean_seconds(kept) / job.mean_seconds(window),
        dropped=lost / (lost + len(kept)),
    )


def stream(job: Job) -> Outcome:
    """Run a job."""
    return anyio.run(functools.partial(_stream, job), backend_options={"loop_factory": VirtualLoop})


def bench_slots(options: argparse.Namespace) -> list[Row]:
    """Without and with ``in_flight``, at several factors and bounds of staleness; the median of the seeds."""
    settings: list[tuple[float, int | None, StalenessPolicy, int | None]] = [(1.5, None, "drop", None)]
    settings += [(factor, options.in_flight, "drop", None) for factor in options.factors]
    settings += [(max(options.factors), options.in_flight, "drop", bound) for bound in options.bounds]
    settings += [(1.5, None, "pace", bound) for bound in options.bounds]
    settings += [(1.5, options.in_flight, "pace", bound) for bound in options.bounds]
    rows: list[Row] = []
    for sigma, n in itertools.product(options.sigma, options.n):
        for factor, in_flight, policy, bound in settings:
            job = Job(sigma, n, factor, in_flight, policy, bound, batches=options.batches)
            found = [stream(attrs.evolve(job, seed=seed)) for seed in options.seeds]
            rows.append(_row(job, found))
            if options.verbose:
                print(" | ".join(map(str, rows[-1].values())), flush=True)
    return rows


def _row(job: Job, found: Sequence[Outcome]) -> Row:
    def median(name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in found))

    return {
        "sigma": f"{job.sigma:g}",
        "n": job.n,
        "in_flight": str(job.in_flight or "-"),
        "factor": f"{job.factor:g}",
        "bound": "-" if job.max_staleness is None else f"{job.policy} {job.max_staleness}",
        "s a batch": f"{median('seconds'):.0f}",
        "alive": f"{median('alive'):.0f}",
        "peak": max(one.peak for one in found),
        "age": f"{median('age'):.1f}",
        "oldest": max(one.oldest for one in found),
        "length / true": f"{median('bias'):.2f}",
        "dropped": f"{median('dropped'):.0%}",
    }


def slots_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-flight", type=int, default=192, help="(default: %(default)s)")
    parser.add_argument("--sigma", type=float, nargs="+", default=[1.0], help="lognormal (default: %(default)s)")
    parser.add_argument("--n", type=int, nargs="+", default=[8], help="rollouts in a group (default: %(default)s)")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.5, 2, 3, 4, 6], help="(default: %(default)s)")
    parser.add_argument("--bounds", type=int, nargs="*", default=[2, 4, 8], help="(default: %(default)s)")
    parser.add_argument("--batches", type=int, default=40, help="measured batches (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print each row when it is measured")
