"""Workers that come and go: the manager's laws hold, and a worker that leaves costs no attempt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import attrs
import pytest

from rollouts.distributed.dispatch import Dispatcher, Link
from rollouts.distributed.messages import leaving_record
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, GenerateFailure
from rollouts.planning.simulation import VirtualLoop
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from tests.distributed import games
from tests.distributed.links import Local, local_workers

BEAT = {"beat_seconds": 0.5}


def on_virtual_clock(function: Callable[[], Any]) -> Any:
    return anyio.run(function, backend_options={"loop_factory": VirtualLoop})


def config(seconds: Callable[[Prompt], float] = lambda prompt: 1.0, **options: Any) -> RolloutConfig:
    """Groups of four that have one attempt, played in the simulated seconds."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.sleep(seconds(prompts[0]))
        return await games.generate(prompts)

    async def reward(sample: Sample) -> float:  # async: a thread would not follow the virtual clock
        return 1.0

    whole = attrs.evolve(games.config(attempts=1), generate_fn=generate, reward_fn=reward, on_failure="stop")
    return attrs.evolve(whole, **options)


def test_a_slot_that_never_starts_does_not_end_a_run_that_has_its_minimum() -> None:
    """One of three has no room; the others play everything."""

    async def run() -> None:
        async with local_workers(config(), (2, 3), room=lambda number: number != 1, **BEAT) as (_, workers):
            samples, manager = await games.batches(workers.config(config()), 5)
            assert workers.alive == (0, 2)
        assert sorted(sample.index or 0 for sample in samples) == list(range(60))
        assert (manager.failures.lost.total(), workers.deaths) == (0, 0)

    on_virtual_clock(run)


@pytest.mark.parametrize("count", [2, (2, 3)])
async def test_a_run_without_its_minimum_does_not_begin(count: Any) -> None:
    """The error is that of the start."""
    with pytest.raises(ExceptionGroup) as group:  # of the tasks of this test's workers
        async with local_workers(config(), count, room=lambda number: number == 0):
            pass
    (error,) = group.value.exceptions
    assert isinstance(error, ConfigError)
    assert "no room" in str(error)


def test_a_worker_that_joins_is_used_at_once() -> None:
    """With room for four rollouts a worker, a second worker doubles the rollouts a second within ten seconds."""
    done: list[float] = []
    joined = 0.0

    async def run() -> None:
        def has_room(number: int) -> bool:
            nonlocal joined
            joined = anyio.current_time()
            return number == 0 or joined >= 60

        async with local_workers(config(), (1, 2), room=has_room, **BEAT) as (local, workers):
            many = config(batch_size=400, over_sampling_factor=1.0, in_flight=24)
            prompts = DataBuffer([{**games.PROMPTS[0]} for _ in range(400)])
            async with (
                AsyncRolloutManager(workers.config(many), prompts) as manager,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(_limit, local, done)
                tasks.start_soon(manager.generate_batch)
                await anyio.sleep(110)
                tasks.cancel_scope.cancel()

    on_virtual_clock(run)
    before = sum(joined - 20 <= time < joined for time in done) / 20
    after = sum(joined + 10 <= time < joined + 30 for time in done) / 20
    assert before == pytest.approx(4, rel=0.05)
    assert after >= 1.8 * before


async def _limit(local: Local, done: list[float]) -> None:
    """Give every new worker room for four rollouts of one second each."""
    seen = 0
    while True:
        for link in local.links[seen:]:
            limit = anyio.CapacityLimiter(4)

            async def generate(prompts: Sequence[Prompt], limit: anyio.CapacityLimiter = limit) -> list[Sample]:
                async with limit:
                    await anyio.sleep(1)
                done.append(anyio.current_time())
                return await games.generate(prompts)

            link.player.config = attrs.evolve(link.player.config, generate_fn=generate)
        seen = len(local.links)
        await anyio.sleep(0.001)


@pytest.mark.parametrize("how", ["signal", "drain"])
def test_a_worker_that_leaves_finishes_its_rollouts(how: str) -> None:
    """It gets no new groups; what it plays for longer than its time, another worker plays, without an attempt lost."""

    async def run() -> None:
        def seconds(prompt: Prompt) -> float:
            return 1000.0 if prompt.index == 2 and len(local.links) == 2 and anyio.current_time() < 5 else 2.0

        async with local_workers(config(seconds), (1, 2), **BEAT) as (local, workers):
            shared = workers.config(config(seconds))
            async with AsyncRolloutManager(shared, DataBuffer(games.PROMPTS)) as manager:
                batch: list[Sample] = []

                async def play() -> None:
                    batch.extend(await manager.generate_batch())

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(play)
                    await anyio.sleep(1)
                    first = next(link for link in local.links if 2 in _indices(link.player))
                    number = local.links.index(first)
                    if how == "signal":
                        first.player.leave()
                    else:
                        workers.drain(number)
                    await anyio.sleep(0.5)
                    assert workers.alive == (1 - number,)
                    assert workers.departures == 0
                assert 20 < anyio.current_time() < 30
            assert sorted(sample.index or 0 for sample in batch) == list(range(12))
            assert (workers.deaths, workers.departures, workers.given_away) == (0, 1, 0)
            assert len(local.links) == 2, "the slot stays empty"
        assert manager.failures.lost.total() == 0

    on_virtual_clock(run)


def _indices(player: Any) -> set[int]:
    """Numbers of the requests in flight; with two workers and one attempt they are the indices of the rollouts."""
    return set(player._playing)


def test_a_worker_that_is_killed_while_it_leaves_costs_no_attempt() -> None:
    """As by a scheduler that does not wait."""

    async def run() -> None:
        async with local_workers(config(lambda prompt: 10.0), (1, 2), **BEAT) as (local, workers):

            async def leave() -> None:
                await anyio.sleep(1)
                local.links[0].player.leave()
                await anyio.sleep(1)
                local.links[0].cut()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave)
                samples, manager = await games.batches(workers.config(config()), 2)
        assert sorted(sample.index or 0 for sample in samples) == list(range(24))
        assert (workers.deaths, workers.departures, manager.failures.lost.total()) == (0, 1, 0)

    on_virtual_clock(run)


def test_the_only_worker_that_leaves_is_followed_by_another() -> None:
    """The minimum is kept, and the rollouts that it did not finish are played by the next one."""

    async def run() -> None:
        slow = config(lambda prompt: 1.0 if len(local.links) > 1 else 1000.0)
        async with local_workers(slow, 1, **BEAT) as (local, workers):
            async with anyio.create_task_group() as tasks:

                async def leave() -> None:
                    await anyio.sleep(1)
                    local.links[0].player.leave()

                tasks.start_soon(leave)
                samples, manager = await games.batches(workers.config(slow), 1)
        assert len(samples) == 12
        assert (len(local.links), workers.departures, manager.failures.lost.total()) == (2, 1, 0)

    on_virtual_clock(run)


@pytest.mark.parametrize("seed", [1])
def test_workers_come_and_go_at_random(seed: int) -> None:
    """Ten joins and leaves a minute for five minutes: every rollout once, groups whole, no attempt lost."""

    async def run() -> None:
        dice = random.Random(seed)
        rooms = set(range(5))
        config_ = config(lambda prompt: dice.lognormvariate(1.0, 1.0), batch_size=10_000, in_flight=32)
        prompts = DataBuffer([dict(games.PROMPTS[0]) for _ in range(10_000)])
        async with local_workers(config_, (3, 5), room=rooms.__contains__, **BEAT) as (local, workers):
            shared = attrs.evolve(workers.config(config_), batch_size=6, over_sampling_factor=2.0)
            samples: list[Sample] = []

            async def play(manager: AsyncRolloutManager) -> None:
                while True:
                    samples.extend(await manager.generate_batch())

            async with AsyncRolloutManager(shared, prompts) as manager, anyio.create_task_group() as tasks:
                tasks.start_soon(play, manager)
                for _ in range(50):
                    await anyio.sleep(dice.expovariate(1 / 6))
                    rooms ^= {dice.randrange(1, 5)}
                    alive = [link for link in local.links if not link.scope.cancel_called]
                    for link in dice.sample(alive, min(1, len(alive))):
                        link.player.leave()
                tasks.cancel_scope.cancel()
            manager.accounting.check()
        indices = [sample.index for sample in samples]
        assert len(indices) == len(set(indices)) > 750
        for start in range(0, len(samples), 4):
            assert len({sample.group_index for sample in samples[start : start + 4]}) == 1
        assert (manager.failures.lost.total(), workers.deaths, manager.accounting.failed) == (0, 0, 0)
        assert workers.departures > 25
        assert len(local.links) > 25

    on_virtual_clock(run)


class _Leaver:
    """A worker that leaves as soon as it gets an order."""

    def __init__(self) -> None:
        self._asked = anyio.Event()

    async def send(self, message: bytes) -> None:
        self._asked.set()

    async def receive(self) -> bytes:
        await self._asked.wait()
        self._asked = anyio.Event()
        return leaving_record()

    async def beat(self) -> None:
        await anyio.sleep(0.5)

    async def aclose(self) -> None: ...


def test_a_rollout_whose_workers_all_leave_fails_in_the_end() -> None:
    """It costs no attempt twenty times; then it is a failure, which the config's policy handles."""

    async def run() -> None:
        async def connect(number: int) -> Link:
            return _Leaver()

        async with Dispatcher(connect, 1) as workers:
            with pytest.raises(GenerateFailure, match="worker 0 left"), anyio.fail_after(3600):
                await workers.generate([Prompt("p", group_index=0, index=0)])
            assert 10 <= workers.departures <= 21

    on_virtual_clock(run)
