"""A large batch is sealed in several turns of the event loop; what other tasks do meanwhile breaks no law."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint

from rollouts.dtypes import VersionSpan
from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample, batch_report
from rollouts.training.metrics import BatchMetrics

GROUPS = 6


@pytest.fixture(autouse=True)
def two_groups_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of six groups takes three turns."""
    monkeypatch.setattr(batch_report, "SAMPLES_A_TURN", 4)


class Packed:
    """Counts the calls of ``Sample.pack``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        pack = Sample.pack

        def counted(sample: Sample) -> Sample:
            self.count += 1
            return pack(sample)

        monkeypatch.setattr(Sample, "pack", counted)


def manager_of(version: Callable[[], str] = lambda: "0") -> AsyncRolloutManager:
    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.index is not None
        sampled = version()
        await checkpoint()
        tokens = [1, *range(2 + prompt.index % 3)]
        mask = [0] + [1] * (len(tokens) - 1)
        versions = [VersionSpan(sampled, 1, len(tokens))]
        return [Sample(tokens=tokens, loss_mask=mask, versions=versions, reward=float(prompt.index % 2))]

    config = RolloutConfig(batch_size=GROUPS, n_samples_per_prompt=2, over_sampling_factor=2, generate_fn=generate)
    return AsyncRolloutManager(config, DataBuffer([str(number) for number in range(90)], epochs=1))


@asynccontextmanager
async def meanwhile(packed: Packed, act: Callable[[], object]) -> AsyncIterator[None]:
    """Another task, which acts once the first part of the batch is packed."""

    async def wait() -> None:
        while packed.count < 4:
            await checkpoint()
        assert packed.count < 2 * GROUPS, "between two parts"
        act()

    async with anyio.create_task_group() as tasks:
        packed.count = 0
        tasks.start_soon(wait)
        yield


async def ready(manager: AsyncRolloutManager, groups: int) -> None:
    """Generate until so many groups are ready, without a request: ``packed`` counts the seal alone."""
    with anyio.fail_after(30):
        while manager.accounting.ready < groups:
            await checkpoint()


async def sealed(monkeypatch: pytest.MonkeyPatch, samples_a_turn: int) -> tuple[list[int], dict[str, float]]:
    """Seal a batch: the turn of another task in which each part was counted, and the numbers."""
    counted_at, turn, done = [], 0, False
    add = BatchMetrics.add

    async def count() -> None:
        nonlocal turn
        while not done:
            turn += 1
            await checkpoint()

    def add_and_look(self: BatchMetrics, samples: Iterable[Sample]) -> None:
        counted_at.append(turn)
        add(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(batch_report, "SAMPLES_A_TURN", samples_a_turn)
        patch.setattr(BatchMetrics, "add", add_and_look)
        manager = manager_of()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count)
            assert len(await manager.generate_batch()) == 2 * GROUPS
            done = True
    of_the_clock = ("seconds", "ended", "slots/", "groups/open")
    return counted_at, {name: value for name, value in manager.metrics.items() if not name.startswith(of_the_clock)}


async def test_other_tasks_run_between_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of a batch that is sealed in one turn."""
    counted_at, numbers = await sealed(monkeypatch, 4)
    assert len(counted_at) == len({*counted_at}) == 3
    assert await sealed(monkeypatch, 1000) == ([counted_at[0]], numbers)


async def test_a_group_that_is_withdrawn_meanwhile_is_in_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one takes its place, and the accounting adds up."""
    packed, withdrawn = Packed(monkeypatch), []
    async with manager_of() as manager, aclosing(manager.stream()) as batches:
        await anext(batches)
        await ready(manager, GROUPS)

        def withdraw() -> None:
            first = manager.ready_groups[0]
            withdrawn.extend(manager.withdraw(lambda group: group is first))

        async with meanwhile(packed, withdraw):
            batch = await anext(batches)
        (gone,) = (group.group_index for group in withdrawn)
        assert gone not in {sample.group_index for sample in batch}
        assert len(batch) == 2 * GROUPS
        assert (manager.accounting.in_batch, manager.accounting.dropped) == (2 * GROUPS, 1)
        manager.accounting.check()


async def test_a_version_that_is_announced_meanwhile_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound of 0 the groups that are too old now are dropped."""
    packed, version = Packed(monkeypatch), "0"
    async with manager_of(lambda: version) as manager:
        manager.announce_version("0")
        async with aclosing(manager.stream(max_staleness=0)) as batches:
            await anext(batches)
            await ready(manager, GROUPS)

            def announce() -> None:
                nonlocal version
                version = "1"
                manager.announce_version("1")

            async with meanwhile(packed, announce):
                batch = await anext(batches)
            assert {name for sample in batch for name in sample.weight_versions} == {"1"}
            assert manager.metrics["staleness/max"] == 0


async def test_a_cancellation_meanwhile_loses_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups stay ready, uncounted, and are in the next batch."""
    packed = Packed(monkeypatch)
    async with manager_of() as manager:
        await manager.generate_batch()
        await ready(manager, GROUPS)
        before = [group.group_index for group in manager.ready_groups][:GROUPS]
        with anyio.CancelScope() as scope:
            async with meanwhile(packed, scope.cancel):
                await manager.generate_batch()
                raise AssertionError("was cancelled")
        assert scope.cancelled_caught
        assert (manager.batches, manager.accounting.in_batch) == (1, GROUPS)
        batch = await manager.generate_batch()
        assert sorted({sample.group_index for sample in batch}) == before  # type: ignore[type-var]
