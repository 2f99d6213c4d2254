"""The stream of batches: generation beside training, versions, and what becomes of old groups."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import anyio
import pytest
from anyio.lowlevel import checkpoint

from rollouts.dtypes import VersionSpan
from rollouts.errors import ConfigError, GenerateFailure
from rollouts.training import AsyncRolloutManager, DataBuffer, Group, Prompt, RolloutConfig, Sample


class Policy:
    """Samples one token under the version of the moment; may be told to hold some groups back."""

    def __init__(self) -> None:
        self.version = "0"
        self.held: dict[int, anyio.Event] = {}

    async def __call__(self, prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        version = self.version
        await checkpoint()
        if prompt.group_index in self.held:
            await self.held[prompt.group_index].wait()
        return [Sample(tokens=[1, 2], loss_mask=[0, 1], versions=[VersionSpan(version, 1, 2)], reward=1.0)]


def manager_of(policy: Policy, *, batch: int = 2, ahead: float = 3, prompts: int = 200, **options: object):  # type: ignore[no-untyped-def]
    config = RolloutConfig(
        batch_size=batch, n_samples_per_prompt=2, over_sampling_factor=ahead, generate_fn=policy, max_attempts=1
    )
    return AsyncRolloutManager(config, DataBuffer([str(n) for n in range(prompts)], epochs=1), **options)


async def settled() -> None:
    """Let everything happen that can happen by itself."""
    await anyio.wait_all_tasks_blocked()


def versions(samples: Sequence[Sample]) -> set[str]:
    return {version for sample in samples for version in sample.weight_versions}


async def test_generation_goes_on_while_the_caller_trains() -> None:
    """With a batch in hand, groups for the next ones are started and end; nobody asks for them."""
    async with manager_of(Policy()) as manager, aclosing(manager.stream()) as batches:
        await anext(batches)
        await settled()
        assert manager.accounting.ready == 6
        assert manager.accounting.in_flight == 0
        second = await anext(batches)
        assert [sample.group_index for sample in second] == [2, 2, 3, 3]
        assert manager.metrics["idle/generator_seconds"] >= 0


async def test_outside_the_stream_nothing_is_started_unasked() -> None:
    """After it is closed, the manager is as it was before: work begins when a batch is asked for."""
    async with manager_of(Policy(), ahead=1) as manager:
        async with aclosing(manager.stream()) as batches:
            await anext(batches)
        await settled()
        taken = manager.accounting.taken
        manager.announce_version("0")
        await settled()
        assert manager.accounting.taken == taken
        await manager.generate_batch()


async def test_the_stream_ends_with_the_data() -> None:
    """What is left of the last batch stays in ready_groups, and the numbers add up."""
    async with manager_of(Policy(), prompts=5) as manager:
        sizes = [len(samples) async for samples in manager.stream()]
        assert sizes == [4, 4]
        assert len(manager.ready_groups) == 1
    assert manager.accounting.in_batch == 4


async def test_drop_keeps_old_groups_out_and_counts_them() -> None:
    """A group that has become too old is recorded again, as dropped; the batch is of newer ones."""
    policy, records = Policy(), []

    def record(group: Group) -> None:
        records.append((group.group_index, group.outcome, group.reason))

    async with manager_of(policy, on_group=record) as manager:
        manager.announce_version("0")
        async with aclosing(manager.stream(max_staleness=0)) as batches:
            assert versions(await anext(batches)) == {"0"}
            with anyio.fail_after(30):
                while manager.accounting.ready < 6:  # noqa: ASYNC110 - recording is done in threads
                    await anyio.sleep(0.001)
            policy.version = "1"
            manager.announce_version("1")
            assert versions(await anext(batches)) == {"1"}
            assert manager.metrics["staleness/max"] == 0
    assert manager.accounting.dropped == 6
    assert [entry for entry in records if entry[1] == "dropped"] == [(n, "dropped", "too old") for n in range(2, 8)]
    assert manager.run_metrics.reasons["too old"] == 6


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
async def test_pace_drops_nothing_and_keeps_the_bound(bound: int) -> None:
    """Ten batches, a new version after each: no group is lost, none is older than allowed, and the bound is used."""
    policy = Policy()
    oldest = []
    async with manager_of(policy, ahead=5) as manager:
        manager.announce_version("0")
        async with aclosing(manager.stream(max_staleness=bound, policy="pace")) as batches:
            for number in range(1, 11):
                await anext(batches)
                oldest.append(manager.metrics["staleness/max"])
                await settled()
                policy.version = str(number)
                manager.announce_version(str(number))
                await settled()
    assert manager.accounting.dropped == 0
    assert max(oldest) == bound


async def test_pace_waits_for_a_slow_group_before_it_is_too_old() -> None:
    """Younger groups are ready, and still the batch waits for the one that could come into no later one."""
    policy = Policy()
    policy.held[2] = anyio.Event()
    async with manager_of(policy, ahead=5) as manager:
        manager.announce_version("0")
        async with aclosing(manager.stream(max_staleness=1, policy="pace")) as batches:
            await anext(batches)
            await settled()
            policy.version = "1"
            manager.announce_version("1")
            await settled()
            got: list[list[Sample]] = []

            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    got.append(await anext(batches))

                tasks.start_soon(ask)
                await settled()
                assert manager.accounting.ready >= 2
                assert got == []
                policy.held[2].set()
    assert 2 in {sample.group_index for sample in got[0]}


async def test_a_trainer_that_announces_nothing_is_not_waited_for() -> None:
    """Asking for the next batch says as well that no version comes of the last one."""
    async with manager_of(Policy()) as manager:
        manager.announce_version("0")
        async with aclosing(manager.stream(max_staleness=0, policy="pace")) as batches:
            with anyio.fail_after(30):
                for _ in range(5):
                    await anext(batches)


async def test_what_breaks_generation_reaches_whoever_asks_next() -> None:
    """Not the task that trains meanwhile; and a hopeless run does not go on by itself."""
    policy = Policy()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index is not None and prompts[0].group_index >= 2:
            raise ValueError("the server has gone")
        return await policy(prompts)

    config = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate, max_attempts=1, patience=3)
    async with AsyncRolloutManager(config, DataBuffer(["p"])) as manager, aclosing(manager.stream()) as batches:
        await anext(batches)
        await settled()
        assert manager.accounting.failed < 10
        with pytest.raises(GenerateFailure, match="the server has gone"):
            await anext(batches)


async def test_a_stream_needs_an_open_manager_to_itself() -> None:
    """Work beside the caller needs somewhere to live, and two streams would share one set of rules."""
    manager = manager_of(Policy())
    with pytest.raises(RuntimeError, match="needs the manager open"):
        await anext(manager.stream())
    async with manager, aclosing(manager.stream()) as batches:
        await anext(batches)
        with pytest.raises(RuntimeError, match="to itself"):
            await anext(manager.stream())


async def test_a_bound_that_is_none_is_refused() -> None:
    """Before anything is generated."""
    async with manager_of(Policy()) as manager:
        with pytest.raises(ConfigError, match="max_staleness"):
            await anext(manager.stream(max_staleness=-1))
        assert manager.accounting.taken == 0
