"""Simulation of filling batches, on a virtual clock.

The scheduler is the real manager; a rollout is a number of seconds. Invariant: results depend on the workload only, not
on the machine's load. The engine runs at most ``concurrency`` rollouts at once, first come first served, each at the
:class:`Speed` of the current load.

This module knows no run, no recipe and no server.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import math
import selectors
import statistics
from collections.abc import Sequence
from typing import Any, Protocol

import anyio
import attrs

from rollouts.dtypes import VersionSpan
from rollouts.errors import ConfigError
from rollouts.training.config import RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.types import Prompt, Sample, Status

__all__ = ["SimulationResult", "Speed", "VirtualLoop", "Workload", "fill"]


class Workload(Protocol):
    """Durations and filter results of the rollouts to simulate."""

    def seconds(self, group: int, member: int) -> float:
        """Seconds of one rollout in the engine, at speed 1."""
        ...

    def outside(self, group: int, member: int) -> float:
        """Seconds of one rollout in its environment."""
        ...

    def passes(self, group: int) -> bool:
        """Whether the filter keeps the group."""
        ...


def _points(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((float(count), float(speed)) for count, speed in points))


@attrs.frozen
class Speed:
    """Speed of each rollout on a server, by the number of rollouts on it.

    A server step has a fixed cost and a cost for each rollout, so seconds are interpolated between two points. Below
    the first point the speed is constant; above the last point the server is saturated: its throughput is constant.
    """

    points: tuple[tuple[float, float], ...] = attrs.field(default=(), converter=_points)
    """``(rollouts at once, speed of each)``; empty for speed 1 at every load."""

    def __attrs_post_init__(self) -> None:
        if any(not (count > 0 and speed > 0 and math.isfinite(count + speed)) for count, speed in self.points):
            raise ConfigError.of("Speed.points", self.points, "pairs of numbers > 0")

    def at(self, count: float) -> float:
        """The speed of each of ``count`` rollouts."""
        if not self.points:
            return 1.0
        above = bisect.bisect(self.points, (count, math.inf))
        if above == 0:
            return self.points[0][1]
        (low, low_speed), rest = self.points[above - 1], self.points[above:]
        if not rest:
            return low_speed * low / count
        high, high_speed = rest[0]
        return 1 / (1 / low_speed + (1 / high_speed - 1 / low_speed) * (count - low) / (high - low))


@attrs.frozen
class SimulationResult:
    """The simulated cost of some batches."""

    seconds: tuple[float, ...]
    """Seconds to fill each batch, in order; without training."""
    started: int
    """Prompts whose rollouts began."""
    kept: int
    busy: float
    """Mean number of rollouts in the engine, over time."""
    age: float
    """Mean number of batches that were sealed between the start of a group and the seal of its batch."""
    mean_load: float
    """Mean number of rollouts in the engine as seen by a rollout there, itself included.

    Larger than :attr:`busy`, as it weights each moment by the number of rollouts.
    """


class _VirtualSelector(selectors.DefaultSelector):
    """Advances the clock to the next timer without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self.now += timeout
            timeout = 0
        return super().select(timeout)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances to the next timer at once; it has no place for threads and sockets."""

    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Engine:
    """Servers with evenly distributed rollouts; a rollout ends when it has received its seconds of service."""

    def __init__(self, speed: Speed, concurrency: int | None, servers: int) -> None:
        self._speed = speed
        self._servers = servers
        self._slots = None if concurrency is None else anyio.Semaphore(concurrency)
        self._ends: list[tuple[float, int, anyio.Event]] = []
        self._served = 0.0  # service that a rollout present from the start has received
        self._since = 0.0
        self._numbers = 0
        self._changed = anyio.Event()
        self.busy = 0.0
        self.squared_load = 0.0

    def begin(self) -> None:
        """Count the load from now on."""
        self._account()
        self.busy = self.squared_load = 0.0

    async def play(self, seconds: float) -> None:
        if self._slots is None:
            await self._serve(seconds)
            return
        async with self._slots:
            await self._serve(seconds)

    async def _serve(self, seconds: float) -> None:
        self._account()
        self._numbers += 1
        ended = anyio.Event()
        heapq.heappush(self._ends, (self._served + seconds, self._numbers, ended))
        self._changed.set()
        await ended.wait()

    async def run(self) -> None:
        """End each rollout when it has received its service."""
        while True:
            self._account()
            while self._ends and self._ends[0][0] <= self._served + 1e-9:
                heapq.heappop(self._ends)[2].set()
            self._changed = anyio.Event()
            wait = (self._ends[0][0] - self._served) / self._rate() if self._ends else math.inf
            with anyio.move_on_after(wait):
                await self._changed.wait()

    def _rate(self) -> float:
        return self._speed.at(len(self._ends) / self._servers)

    def _account(self) -> None:
        now = anyio.current_time()
        if self._ends:
            self._served += (now - self._since) * self._rate()
            self.busy += (now - self._since) * len(self._ends)
            self.squared_load += (now - self._since) * len(self._ends) ** 2
        self._since = now


def fill(
    workload: Workload,
    *,
    batch_size: int,
    n: int,
    factor: float,
    batches: int = 4,
    concurrency: int | None = None,
    speed: Speed | None = None,
    servers: int = 1,
    in_flight: int | None = None,
    warm_up: int = 0,
) -> SimulationResult:
    """Simulate filling batches in sequence; rollouts in flight are carried to the next batch.

    Args:
        workload: durations and filter results.
        batch_size: groups in a batch.
        n: rollouts in a group.
        factor: the ``over_sampling_factor``.
        batches: number of batches.
        concurrency: maximum number of rollouts in the engine, on all servers together; ``None`` for no limit.
        speed: speed of one server.
        servers: number of servers.
        in_flight: maximum number of rollouts that run, in the engine and outside; ``None`` for no limit.
        warm_up: number of batches that do not count.
    """

    async def play() -> SimulationResult:
        engine = _Engine(speed or Speed(), concurrency, servers)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            filled = await _fill(workload, engine, batch_size, n, factor, batches, in_flight, warm_up)
            tasks.cancel_scope.cancel()
        return filled

    return anyio.run(play, backend_options={"loop_factory": VirtualLoop})


async def _fill(
    workload: Workload,
    engine: _Engine,
    batch_size: int,
    n: int,
    factor: float,
    batches: int,
    in_flight: int | None,
    warm_up: int,
) -> SimulationResult:
    began: dict[int, int] = {}  # the batch during which each group began

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.group_index is not None
        assert prompt.index is not None
        group, member = prompt.group_index, prompt.index % n
        began.setdefault(group, manager.batches)
        await engine.play(workload.seconds(group, member))
        if outside := workload.outside(group, member):
            await anyio.sleep(outside)
        sample = Sample(
            tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0.0, -1.0], versions=[VersionSpan("1", 1, 2)]
        )
        sample.status, sample.reward = Status.COMPLETED, float(workload.passes(group))
        return [sample]

    async def passes(samples: Sequence[Sample]) -> bool:  # async: a thread would not follow the virtual clock
        return samples[0].reward == 1.0

    config = RolloutConfig(
        batch_size=batch_size,
        n_samples_per_prompt=n,
        over_sampling_factor=factor,
        in_flight=in_flight,
        generate_fn=generate,
        filter_fn=passes,
        rollout_seconds=1e9,
        reward_seconds=1e9,
        filter_seconds=1e9,
    )
    ages: list[int] = []
    manager = AsyncRolloutManager(config, DataBuffer(["prompt"]))
    async with manager:
        for _ in range(warm_up):
            await manager.generate_batch()
        ends, started = [anyio.current_time()], manager.accounting.taken
        engine.begin()
        for batch in range(warm_up, warm_up + batches):
            samples = await manager.generate_batch()
            ages += [batch - began[sample.group_index] for sample in samples[::n] if sample.group_index is not None]
            ends.append(anyio.current_time())
        return SimulationResult(
            seconds=tuple(end - start for start, end in itertools.pairwise(ends)),
            started=manager.accounting.taken - started,
            kept=batches * batch_size,
            busy=engine.busy / max(ends[-1] - ends[0], 1e-9),
            age=statistics.fmean(ages),
            mean_load=engine.squared_load / max(engine.busy, 1e-9),
        )
