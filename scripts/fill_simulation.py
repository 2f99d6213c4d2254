"""How long a batch takes to fill, and how many prompts it costs: our scheduler, and slime's algorithm, on one clock.

Both play the same groups: rollout ``j`` of prompt ``i`` takes a lognormal time that depends on ``i`` and ``j`` only,
and three prompts of every ten give rewards without spread, which the filter drops. An engine runs at most ``slots``
rollouts at once, first come first served. The clock is virtual, so the machine's load does not matter.

Ours is the real manager. slime's is its synchronous loop: whenever accepted and pending groups fall below the batch it
fetches ``over_sampling_batch_size`` more, filters groups as they finish, and at the end aborts what is in flight; those
prompts are spent. Its wait for the abort is left out, in its favour.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import attrs

from rollouts.dtypes import VersionSpan
from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample, Status

__all__ = ["Result", "World", "run_ours", "run_slime"]


@attrs.frozen
class World:
    """What is played."""

    batch_size: int = 32
    n: int = 8
    batches: int = 10
    zero_spread: int = 3
    """Prompts of every ten whose rewards do not differ."""
    sigma: float = 1.0
    """Spread of the logarithm of a rollout's seconds; their median is 10."""
    slots: int | None = None
    """Rollouts that the engine runs at once; ``None`` for no limit."""
    seed: int = 0

    def seconds(self, group: int, member: int) -> float:
        return random.Random(f"{self.seed}/{group}/{member}").lognormvariate(2.302585, self.sigma)

    def has_spread(self, group: int) -> bool:
        tens = random.Random(f"{self.seed}/spread/{group // 10}").sample(range(10), self.zero_spread)
        return group % 10 not in tens


@attrs.frozen
class Result:
    """What ten batches cost."""

    seconds: float
    """To fill all batches, training left out."""
    started: int
    """Prompts whose rollouts began."""
    kept: int

    @property
    def started_per_kept(self) -> float:
        return self.started / self.kept


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


def _run(function: Callable[[], Awaitable[Result]]) -> Result:
    return anyio.run(function, backend_options={"loop_factory": _VirtualLoop})


class _Engine:
    """Slots, first come first served."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._slots = None if world.slots is None else anyio.Semaphore(world.slots)

    async def play(self, group: int, member: int) -> None:
        if self._slots is None:
            await anyio.sleep(self._world.seconds(group, member))
            return
        async with self._slots:
            await anyio.sleep(self._world.seconds(group, member))


def run_ours(world: World, over_sampling_factor: float) -> Result:
    """Consecutive batches from the real manager; what is in flight is carried from one to the next."""
    return _run(lambda: _ours(world, over_sampling_factor))


async def _ours(world: World, over_sampling_factor: float) -> Result:
    engine = _Engine(world)
    begun: set[int] = set()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.group_index is not None
        assert prompt.index is not None
        begun.add(prompt.group_index)
        member = prompt.index % world.n
        await engine.play(prompt.group_index, member)
        spread = world.has_spread(prompt.group_index)
        sample = Sample(
            tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0.0, -1.0], versions=[VersionSpan("1", 1, 2)]
        )
        sample.status, sample.reward = Status.COMPLETED, float(spread and member % 2)
        return [sample]

    async def spread(samples: Sequence[Sample]) -> bool:  # async, so that no thread stands beside the virtual clock
        return len({sample.reward for sample in samples}) > 1

    config = RolloutConfig(
        batch_size=world.batch_size,
        n_samples_per_prompt=world.n,
        over_sampling_factor=over_sampling_factor,
        generate_fn=generate,
        filter_fn=spread,  # type: ignore[arg-type]  # an async filter is one too
        rollout_seconds=1e9,
        reward_seconds=1e9,
        filter_seconds=1e9,
    )
    kept = 0
    async with AsyncRolloutManager(config, DataBuffer(["prompt"])) as manager:
        for _ in range(world.batches):
            kept += len({sample.group_index for sample in await manager.generate_batch()})
        return Result(anyio.current_time(), manager.accounting.taken, kept)


def run_slime(world: World, over_sampling_batch_size: int | None = None) -> Result:
    """The same from slime's loop."""
    refill = over_sampling_batch_size or world.batch_size
    seconds, started, kept = 0.0, 0, 0
    for _ in range(world.batches):
        spent, begun = _slime_batch(world, refill, started)
        seconds, started, kept = seconds + spent, started + begun, kept + world.batch_size
    return Result(seconds, started, kept)


def _slime_batch(world: World, refill: int, first: int) -> tuple[float, int]:
    """One call of the rollout function on an idle engine: its seconds, and the prompts it took."""
    now, taken, accepted, remaining = 0.0, 0, 0, 0
    queue: list[tuple[int, int]] = []
    running: list[tuple[float, int]] = []
    missing: dict[int, int] = {}
    while True:
        while remaining < world.batch_size:
            for group in range(first + taken, first + taken + refill):
                missing[group] = world.n
                queue += [(group, member) for member in range(world.n)]
            taken, remaining = taken + refill, remaining + refill
        while queue and (world.slots is None or len(running) < world.slots):
            group, member = queue.pop(0)
            heapq.heappush(running, (now + world.seconds(group, member), group))
        now, group = heapq.heappop(running)
        missing[group] -= 1
        if missing[group]:
            continue
        if not world.has_spread(group):
            remaining -= 1
            continue
        accepted += 1
        if accepted == world.batch_size:
            return now, taken
