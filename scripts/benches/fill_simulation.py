"""Simulation of the time and the prompts to fill a batch: our scheduler and slime's algorithm on a virtual clock.

Both run the same groups: rollout ``j`` of prompt ``i`` takes a lognormal time that depends on ``i`` and ``j`` only,
and three prompts of every ten give rewards without spread, which the filter drops. An engine runs at most ``slots``
rollouts at once, first come first served. The clock is virtual, so the machine's load does not matter.

Ours is the real manager. slime's is its synchronous loop: whenever accepted and pending groups fall below the batch it
fetches ``over_sampling_batch_size`` more, filters groups as they finish, and at the end aborts what is in flight; those
prompts are spent. Its wait for the abort is left out, in its favour.
"""

from __future__ import annotations

import heapq
import random

import attrs

from rollouts.planning.simulation import fill

__all__ = ["Result", "World", "run_ours", "run_slime"]


@attrs.frozen
class World:
    """The simulated workload."""

    batch_size: int = 32
    n: int = 8
    batches: int = 10
    zero_spread: int = 3
    """Prompts of every ten without spread."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of a rollout's seconds; their median is 10."""
    slots: int | None = None
    """Rollouts that the engine runs at once; ``None`` for no limit."""
    seed: int = 0

    def seconds(self, group: int, member: int) -> float:
        return random.Random(f"{self.seed}/{group}/{member}").lognormvariate(2.302585, self.sigma)

    def outside(self, group: int, member: int) -> float:
        return 0.0

    def passes(self, group: int) -> bool:
        tens = random.Random(f"{self.seed}/spread/{group // 10}").sample(range(10), self.zero_spread)
        return group % 10 not in tens


@attrs.frozen
class Result:
    """The cost of ten batches."""

    seconds: float
    """Seconds to fill all batches, without training."""
    started: int
    """Prompts whose rollouts were started."""
    kept: int

    @property
    def started_per_kept(self) -> float:
        return self.started / self.kept


def run_ours(world: World, over_sampling_factor: float) -> Result:
    """Consecutive batches from the real manager; groups in flight go into the next batch."""
    filled = fill(
        world,
        batch_size=world.batch_size,
        n=world.n,
        factor=over_sampling_factor,
        batches=world.batches,
        concurrency=world.slots,
    )
    return Result(sum(filled.seconds), filled.started, filled.kept)


def run_slime(world: World, over_sampling_batch_size: int | None = None) -> Result:
    """The same from slime's loop."""
    refill = over_sampling_batch_size or world.batch_size
    seconds, started, kept = 0.0, 0, 0
    for _ in range(world.batches):
        spent, begun = _slime_batch(world, refill, started)
        seconds, started, kept = seconds + spent, started + begun, kept + world.batch_size
    return Result(seconds, started, kept)


def _slime_batch(world: World, refill: int, first: int) -> tuple[float, int]:
    """Seconds and prompts of one call of the rollout function on an idle engine."""
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
        if not world.passes(group):
            remaining -= 1
            continue
        accepted += 1
        if accepted == world.batch_size:
            return now, taken
