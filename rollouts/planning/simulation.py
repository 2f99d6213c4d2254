"""How long batches take to fill, on a clock that is moved and not waited for.

The scheduler is the real manager; rollouts are seconds. Invariant: the machine's load changes no number, and the same
workload gives the same numbers. An engine runs at most ``concurrency`` rollouts at once, first come first served, and
each of them as fast as :class:`Speed` says of so many.

This module knows no run, no recipe and no server.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import math
import selectors
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

__all__ = ["SimulationResult", "Speed", "Workload", "fill"]


class Workload(Protocol):
    """What is to be played, whoever plays it."""

    def seconds(self, group: int, member: int) -> float:
        """Of one rollout in the engine, at speed 1."""
        ...

    def outside(self, group: int, member: int) -> float:
        """Seconds of it in its environment."""
        ...

    def passes(self, group: int) -> bool:
        """Whether the filter keeps the group."""
        ...


def _points(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((float(count), float(speed)) for count, speed in points))


@attrs.frozen
class Speed:
    """How fast a server runs each of the rollouts in it, by how many they are.

    A step of a server costs something by itself and something for each rollout in it: between two points the seconds
    that each takes are interpolated. Below the first the speed is that of the first; above the last the server is
    full: its throughput stays what it was, shared by more.
    """

    points: tuple[tuple[float, float], ...] = attrs.field(default=(), converter=_points)
    """``(rollouts at once, speed of each)``; none for a speed of 1 however many there are."""

    def __attrs_post_init__(self) -> None:
        if any(not (count > 0 and speed > 0 and math.isfinite(count + speed)) for count, speed in self.points):
            raise ConfigError.of("Speed.points", self.points, "pairs of numbers > 0")

    def at(self, count: float) -> float:
        """Of each of ``count`` rollouts."""
        if not self.points:
            return 1.0
        at = bisect.bisect(self.points, (count, math.inf))
        if at == 0:
            return self.points[0][1]
        (low, slow), rest = self.points[at - 1], self.points[at:]
        if not rest:
            return slow * low / count
        high, fast = rest[0]
        return 1 / (1 / slow + (1 / fast - 1 / slow) * (count - low) / (high - low))


@attrs.frozen
class SimulationResult:
    """What some batches cost."""

    seconds: tuple[float, ...]
    """Of each batch, one after the other; training left out."""
    started: int
    """Prompts whose rollouts began."""
    kept: int
    busy: float
    """Rollouts that were in the engine at a time, in the mean."""
    mean_load: float
    """Rollouts that one found there, itself included, in the mean over all of its time in the engine.

    More than :attr:`busy`: most rollouts are there when most are.
    """


class _VirtualSelector(selectors.DefaultSelector):
    """Instead of waiting for a timer it moves the clock to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self.now += timeout
            timeout = 0
        return super().select(timeout)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Engine:
    """Servers that share what they are sent evenly; each rollout has received so much service when it ends."""

    def __init__(self, speed: Speed, concurrency: int | None, servers: int) -> None:
        self._speed = speed
        self._servers = servers
        self._places = None if concurrency is None else anyio.Semaphore(concurrency)
        self._ends: list[tuple[float, int, anyio.Event]] = []
        self._served = 0.0  # to each that is here
        self._since = 0.0
        self._numbers = 0
        self._news = anyio.Event()
        self.busy = 0.0
        self.company = 0.0

    async def play(self, seconds: float) -> None:
        if self._places is None:
            await self._serve(seconds)
            return
        async with self._places:
            await self._serve(seconds)

    async def _serve(self, seconds: float) -> None:
        self._account()
        self._numbers += 1
        ended = anyio.Event()
        heapq.heappush(self._ends, (self._served + seconds, self._numbers, ended))
        self._news.set()
        await ended.wait()

    async def run(self) -> None:
        """End rollouts as their service is done."""
        while True:
            self._account()
            while self._ends and self._ends[0][0] <= self._served + 1e-9:
                heapq.heappop(self._ends)[2].set()
            self._news = anyio.Event()
            wait = (self._ends[0][0] - self._served) / self._rate() if self._ends else math.inf
            with anyio.move_on_after(wait):
                await self._news.wait()

    def _rate(self) -> float:
        return self._speed.at(len(self._ends) / self._servers)

    def _account(self) -> None:
        now = anyio.current_time()
        if self._ends:
            self._served += (now - self._since) * self._rate()
            self.busy += (now - self._since) * len(self._ends)
            self.company += (now - self._since) * len(self._ends) ** 2
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
) -> SimulationResult:
    """Fill batches one after the other; what is in flight is carried from one to the next.

    Args:
        workload: what is played.
        batch_size: groups.
        n: rollouts in a group.
        factor: the ``over_sampling_factor``.
        batches: how many.
        concurrency: rollouts in the engine at once, all servers together; ``None`` for no limit.
        speed: of one server.
        servers: that share the rollouts.
    """

    async def play() -> SimulationResult:
        engine = _Engine(speed or Speed(), concurrency, servers)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            filled = await _fill(workload, engine, batch_size, n, factor, batches)
            tasks.cancel_scope.cancel()
        return filled

    return anyio.run(play, backend_options={"loop_factory": _VirtualLoop})


async def _fill(
    workload: Workload, engine: _Engine, batch_size: int, n: int, factor: float, batches: int
) -> SimulationResult:
    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.group_index is not None
        assert prompt.index is not None
        group, member = prompt.group_index, prompt.index % n
        await engine.play(workload.seconds(group, member))
        if outside := workload.outside(group, member):
            await anyio.sleep(outside)
        sample = Sample(
            tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0.0, -1.0], versions=[VersionSpan("1", 1, 2)]
        )
        sample.status, sample.reward = Status.COMPLETED, float(workload.passes(group))
        return [sample]

    async def passes(samples: Sequence[Sample]) -> bool:  # async, so that no thread stands beside the virtual clock
        return samples[0].reward == 1.0

    config = RolloutConfig(
        batch_size=batch_size,
        n_samples_per_prompt=n,
        over_sampling_factor=factor,
        generate_fn=generate,
        filter_fn=passes,
        rollout_seconds=1e9,
        reward_seconds=1e9,
        filter_seconds=1e9,
    )
    ends = [0.0]
    async with AsyncRolloutManager(config, DataBuffer(["prompt"])) as manager:
        for _ in range(batches):
            await manager.generate_batch()
            ends.append(anyio.current_time())
        seconds = tuple(end - start for start, end in itertools.pairwise(ends))
        started, kept = manager.accounting.taken, batches * batch_size
        return SimulationResult(
            seconds, started, kept, engine.busy / max(ends[-1], 1e-9), engine.company / max(engine.busy, 1e-9)
        )
