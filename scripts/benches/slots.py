"""Seconds a batch, age and bias of length by admission.

The scheduler is the real manager; a rollout is a lognormal number of seconds, the same ones for every setting. The
trainer takes no time and announces a version for each batch. Lengths in batches are compared with those of all groups
that were taken from the data meanwhile; 1.00 means no bias. There are three clocks:

1. ``virtual``: rollouts only sleep, and the load of the machine has no effect.
2. ``real``: agents whose policy sleeps before it replies, ``--scale`` times as long as on the virtual clock.
3. ``engine``: agents whose replies the embedded engine samples, in a separate process. A reply has as many tokens as
   the rollout has seconds on the virtual clock, so that the engine decides the time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import anyio
import attrs

from rollouts.dtypes import Completion, Endpoint, SamplingParams, VersionSpan
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import engine_process
from rollouts.environments import SingleTurnEnvironment
from rollouts.inference.base import CompletionRequest
from rollouts.inference.sglang import SGLangPolicy
from rollouts.planning.simulation import VirtualLoop
from rollouts.renderer import renderer_for
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    Prompt,
    RolloutConfig,
    Sample,
    Status,
    agent_rollout_to_samples,
)
from rollouts.training.staleness import StalenessPolicy

__all__ = ["Job", "Outcome", "bench_slots", "slots_options", "stream"]

Row = dict[str, float | int | str]
Clock: TypeAlias = Literal["virtual", "real", "engine"]
Play: TypeAlias = Callable[[Prompt, float], Awaitable[Sample]]
"""Plays a prompt; the number is the seconds that it takes on the virtual clock."""
_MOST_TOKENS = 900
"""Of a reply of the engine: its context has 1,024."""


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
    clock: Clock = "virtual"
    scale: float = 1.0
    """Of the real clock: its seconds for one of the virtual clock."""

    def seconds(self, index: int) -> float:
        return 20 * random.Random(f"{self.seed}/{index}").lognormvariate(0, self.sigma)

    @property
    def slots(self) -> int:
        """Rollouts that may run at once."""
        open_groups = math.ceil(self.rollouts / self.n * self.factor)
        return self.in_flight or open_groups * self.n

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
    cpu: float
    """Microseconds of this process for a rollout."""


class _Sleeping(ScriptedPolicy):
    """A policy whose replies take some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda tokens: [1, 2, 3])
        self._seconds = seconds

    async def complete(self, request: CompletionRequest) -> Completion:
        await anyio.sleep(self._seconds)
        return await super().complete(request)


@contextlib.asynccontextmanager
async def _playing(job: Job) -> AsyncIterator[Play]:
    """The function that plays a rollout on the clock of the job."""

    async def sleep(prompt: Prompt, seconds: float) -> Sample:
        await anyio.sleep(seconds)
        return Sample(
            tokens=[1, 2],
            loss_mask=[0, 1],
            rollout_log_probs=[0.0, -1.0],
            versions=[VersionSpan("", 1, 2)],
            status=Status.COMPLETED,
            reward=1.0,
        )

    if job.clock == "virtual":
        yield sleep
        return
    renderer = renderer_for(str(DEMO_MODEL))
    play = functools.partial(agent_rollout_to_samples, environment_cls=SingleTurnEnvironment, tokenizer=renderer)

    async def scripted(prompt: Prompt, seconds: float) -> Sample:
        (sample,) = await play(prompt, endpoint=Endpoint(), policy=_Sleeping(job.scale * seconds))
        return sample

    if job.clock == "real":
        yield scripted
        return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "engine.log"
        async with engine_process(DEMO_MODEL, log, slots=job.slots) as engine:
            endpoint = Endpoint(base_url=engine.url)
            async with SGLangPolicy(endpoint, vocab_size=renderer.vocab_size) as policy:

                async def sampled(prompt: Prompt, seconds: float) -> Sample:
                    count = min(max(1, round(seconds)), _MOST_TOKENS)
                    sampling = SamplingParams(max_new_tokens=count, min_new_tokens=count)
                    (sample,) = await play(prompt, endpoint=endpoint, policy=policy, sampling=sampling)
                    return sample

                yield sampled


async def _stream(job: Job) -> Outcome:
    async with _playing(job) as play:
        return await _played(job, play)


async def _played(job: Job, play: Play) -> Outcome:
    alive = [0, 0, 0]
    """Rollouts that run, the most at once, and rollouts that ended."""
    began: dict[int, int] = {}

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.index is not None
        assert prompt.group_index is not None
        version = manager.staleness.current
        began.setdefault(prompt.group_index, version)
        alive[0] += 1
        alive[1] = max(alive[:2])
        sample = await play(prompt, job.seconds(prompt.index))
        alive[0] -= 1
        alive[2] += 1
        sample.reward = 1.0
        sample.versions = [VersionSpan(str(version), span.start, span.stop) for span in sample.versions]
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
    ended, cpu = 0, 0.0
    async with manager:
        manager.announce_version("1")
        batch_stream = manager.stream(max_staleness=job.max_staleness, policy=job.policy)
        for number in range(job.warm_up + job.batches):
            if number == job.warm_up:
                ended, cpu = alive[2], time.process_time()
            samples = await anext(batch_stream)
            if number >= job.warm_up:
                groups = [sample.group_index for sample in samples[:: job.n] if sample.group_index is not None]
                batches.append(groups)
                running.append(manager.metrics["slots/running"])
                ages += [manager.staleness.current - began[group] for group in groups]
            ends.append(anyio.current_time())
            dropped.append(manager.accounting.dropped)
            manager.announce_version(str(number + 2))
        cpu = (time.process_time() - cpu) / (alive[2] - ended)
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
        cpu=1e6 * cpu,
    )


def stream(job: Job) -> Outcome:
    """Run a job."""
    options = {"loop_factory": VirtualLoop} if job.clock == "virtual" else {}
    return anyio.run(functools.partial(_stream, job), backend_options=options)


def bench_slots(options: argparse.Namespace) -> list[Row]:
    """Without and with ``in_flight``, at several factors and bounds of staleness; the median of the seeds."""
    settings: list[tuple[float, int | None, StalenessPolicy, int | None]] = [(1.5, None, "drop", None)]
    settings += [(factor, options.in_flight, "drop", None) for factor in options.factors]
    if options.clock == "virtual":
        settings += [(max(options.factors), options.in_flight, "drop", bound) for bound in options.bounds]
        settings += [(1.5, None, "pace", bound) for bound in options.bounds]
        settings += [(1.5, options.in_flight, "pace", bound) for bound in options.bounds]
    rows: list[Row] = []
    for sigma, n in itertools.product(options.sigma, options.n):
        for factor, in_flight, policy, bound in settings:
            job = Job(sigma, n, factor, in_flight, policy, bound, options.rollouts, options.warm_up, options.batches)
            job = attrs.evolve(job, clock=options.clock, scale=options.scale)
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
        "s a batch": f"{median('seconds'):.3g}",
        "batches an hour": f"{3600 / median('seconds'):,.0f}",
        "alive": f"{median('alive'):.0f}",
        "peak": max(one.peak for one in found),
        "age": f"{median('age'):.1f}",
        "oldest": max(one.oldest for one in found),
        "length / true": f"{median('bias'):.2f}",
        "dropped": f"{median('dropped'):.0%}",
        "µs CPU a rollout": f"{median('cpu'):.0f}",
    }


def slots_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clock", choices=get_args(Clock), default="virtual", help="(default: %(default)s)")
    parser.add_argument("--scale", type=float, default=0.02, help="of the real clock (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=128, help="in a batch (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=20, help="batches that do not count (default: %(default)s)")
    parser.add_argument("--in-flight", type=int, default=192, help="(default: %(default)s)")
    parser.add_argument("--sigma", type=float, nargs="+", default=[1.0], help="lognormal (default: %(default)s)")
    parser.add_argument("--n", type=int, nargs="+", default=[8], help="rollouts in a group (default: %(default)s)")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.5, 2, 3, 4, 6], help="(default: %(default)s)")
    parser.add_argument("--bounds", type=int, nargs="*", default=[2, 4, 8], help="(default: %(default)s)")
    parser.add_argument("--batches", type=int, default=40, help="measured batches (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print each row when it is measured")
