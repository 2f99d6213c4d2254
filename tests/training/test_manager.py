"""The stream of batches: generation during training, versions, and the treatment of stale groups."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint

from rollouts.concurrency.boundary import waits
from rollouts.concurrency.deadlines import listed_pause
from rollouts.concurrency.times import now
from rollouts.dtypes import VersionSpan
from rollouts.errors import ConfigError, FilterFailure, GenerateFailure
from rollouts.training import AsyncRolloutManager, DataBuffer, Group, Prompt, RolloutConfig, Sample, Status


class Policy:
    """Samples one token under the current version; can delay chosen groups."""

    def __init__(self) -> None:
        self.version = "0"
        self.delayed: dict[int, anyio.Event] = {}

    async def __call__(self, prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        version = self.version
        await checkpoint()
        if prompt.group_index in self.delayed:
            await self.delayed[prompt.group_index].wait()
        return [Sample(tokens=[1, 2], loss_mask=[0, 1], versions=[VersionSpan(version, 1, 2)], reward=1.0)]


def manager_of(policy: Policy, *, batch: int = 2, ahead: float = 3, prompts: int = 200, **options: object):  # type: ignore[no-untyped-def]
    config = RolloutConfig(
        batch_size=batch, n_samples_per_prompt=2, over_sampling_factor=ahead, generate_fn=policy, max_attempts=1
    )
    return AsyncRolloutManager(config, DataBuffer([str(n) for n in range(prompts)], epochs=1), **options)


async def settled() -> None:
    """Run the event loop until no task can proceed."""
    await anyio.wait_all_tasks_blocked()


def versions(samples: Sequence[Sample]) -> set[str]:
    return {version for sample in samples for version in sample.weight_versions}


async def test_generation_goes_on_while_the_caller_trains() -> None:
    """While the caller has a batch, groups of the next batches start and finish without a request."""
    began = now()
    async with manager_of(Policy()) as manager, aclosing(manager.stream()) as batches:
        await anext(batches)
        assert began - 1e-4 <= manager.metrics["ended"] <= now() + 1e-4
        await settled()
        assert manager.accounting.ready == 6
        assert manager.accounting.in_flight == 0
        second = await anext(batches)
        assert [sample.group_index for sample in second] == [2, 2, 3, 3]
        assert manager.metrics["idle/generator_seconds"] >= 0


async def test_a_manager_that_has_begun_restores_no_state() -> None:
    """Its groups would be counted twice: while it is open, and after it took prompts."""
    manager = manager_of(Policy())
    state = manager.state_dict()
    async with manager:
        with pytest.raises(ConfigError, match="expected a manager that has not begun"):
            manager.load_state_dict(state)
        await manager.generate_batch()
    with pytest.raises(ConfigError, match="expected a manager that has not begun"):
        manager.load_state_dict(state)


async def test_a_group_that_is_dropped_while_the_caller_trains_is_replaced() -> None:
    """At once, and not with the next request."""

    async def keeps(samples: Sequence[Sample]) -> bool:
        return samples[0].group_index != 3

    policy = Policy()
    policy.delayed[3] = anyio.Event()
    manager = manager_of(policy)
    manager = AsyncRolloutManager(attrs.evolve(manager.config, filter_fn=keeps), manager.data_buffer)
    async with manager, aclosing(manager.stream()) as batches:
        await anext(batches)
        await settled()
        assert (manager.accounting.ready, manager.accounting.in_flight) == (5, 1)
        policy.delayed[3].set()
        with anyio.fail_after(20):
            while manager.accounting.in_flight:
                await checkpoint()
        assert (manager.accounting.ready, manager.accounting.dropped) == (6, 1)


async def test_outside_the_stream_no_group_starts_without_a_request() -> None:
    """After the stream is closed, groups start only when a batch is requested."""
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
    """The rest of the last batch stays in ready_groups, and the numbers add up."""
    async with manager_of(Policy(), prompts=5) as manager:
        sizes = [len(samples) async for samples in manager.stream()]
        assert sizes == [4, 4]
        assert len(manager.ready_groups) == 1
    assert manager.accounting.in_batch == 4


async def test_drop_keeps_old_groups_out_and_counts_them() -> None:
    """A group that has become too old is recorded again, as dropped; the batch contains newer ones."""
    policy, records = Policy(), []

    def record(group: Group) -> None:
        records.append((group.group_index, group.outcome, group.reason))

    async with manager_of(policy, on_group=record) as manager:
        manager.announce_version("0")
        async with aclosing(manager.stream(max_staleness=0)) as batches:
            first = await anext(batches)
            assert versions(first) == {"0"}
            with anyio.fail_after(30):
                while manager.accounting.ready < 6:  # noqa: ASYNC110 - recording is done in threads
                    await anyio.sleep(0.001)
            policy.version = "1"
            manager.announce_version("1")
            assert versions(await anext(batches)) == {"1"}
            assert manager.metrics["staleness/max"] == 0
    assert manager.accounting.dropped == 6
    old = sorted({*range(8)} - {sample.group_index for sample in first})  # threads record, so any two may be first
    assert sorted(entry for entry in records if entry[1] == "dropped") == [(n, "dropped", "too old") for n in old]
    assert manager.run_metrics.reasons["too old"] == 6


@pytest.mark.parametrize(("bound", "ahead"), [(0, 5), (1, 5), (2, 2), (3, 5)])
async def test_pace_drops_nothing_and_keeps_the_bound(bound: int, ahead: int) -> None:
    """Ten batches, a new version after each: no group is lost, none is older than allowed, and the bound is used.

    A version starts the groups that it leaves room for at once; ``over_sampling_factor`` limits them, too.
    """
    policy = Policy()
    oldest = []
    async with manager_of(policy, ahead=ahead) as manager:
        manager.announce_version("0")
        async with aclosing(manager.stream(max_staleness=bound, policy="pace")) as batches:
            for number in range(1, 11):
                await anext(batches)
                oldest.append(manager.metrics["staleness/max"])
                await settled()
                policy.version = str(number)
                manager.announce_version(str(number))
                await settled()
                assert manager.accounting.ready + manager.accounting.in_flight == min(2 * (bound + 1), 2 * ahead)
    assert manager.accounting.dropped == 0
    assert max(oldest) == bound


async def test_pace_waits_for_a_slow_group_before_it_is_too_old() -> None:
    """The batch waits for a group that would be too old for the next one, although newer groups are ready."""
    policy = Policy()
    policy.delayed[2] = anyio.Event()
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
                policy.delayed[2].set()
    assert 2 in {sample.group_index for sample in got[0]}


async def test_a_trainer_that_announces_nothing_is_not_waited_for() -> None:
    """A request for the next batch means that the last one leads to no new version."""
    async with manager_of(Policy()) as manager:
        manager.announce_version("0")
        async with aclosing(manager.stream(max_staleness=0, policy="pace")) as batches:
            with anyio.fail_after(30):
                for _ in range(5):
                    await anext(batches)


async def test_an_error_of_generation_is_raised_by_the_next_request() -> None:
    """Errors are raised to the caller, not in the training task; and no more groups are started."""
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
    """Concurrent generation needs the manager's task group, and two streams would share one staleness bound."""
    manager = manager_of(Policy())
    with pytest.raises(RuntimeError, match="needs the manager open"):
        await anext(manager.stream())
    async with manager, aclosing(manager.stream()) as batches:
        await anext(batches)
        with pytest.raises(RuntimeError, match="to itself"):
            await anext(manager.stream())


async def test_an_invalid_bound_is_refused() -> None:
    """Before anything is generated."""
    async with manager_of(Policy()) as manager:
        with pytest.raises(ConfigError, match="max_staleness"):
            await anext(manager.stream(max_staleness=-1))
        assert manager.accounting.taken == 0


# -- answers of filters, and groups that leave by another way ------------------------------------------------------


@attrs.frozen
class Answer:
    """As trainers write them."""

    keep: Any
    reason: str | None = None
    keep_when_insufficient: bool = False


async def play(prompts: Sequence[Prompt]) -> list[Sample]:
    await checkpoint()
    (prompt,) = prompts
    assert prompt.index is not None
    return [Sample(tokens=[1, 2], status=Status.COMPLETED, reward=float(prompt.index % 2))]


def plain(**options: Any) -> RolloutConfig:
    return RolloutConfig(**{"batch_size": 2, "n_samples_per_prompt": 2, "generate_fn": play, **options})


async def test_a_filter_may_give_its_reason() -> None:
    """A filter may return an object with ``keep``; its reason is counted."""

    def check(samples: Sequence[Sample]) -> Any:
        dull = samples[0].group_index in (0, 2)
        return Answer(keep=not dull, reason="dull" if dull else None)

    settled: list[Group] = []
    one_for_one = plain(filter_fn=check, over_sampling_factor=1.0)
    manager = AsyncRolloutManager(one_for_one, DataBuffer(["a", "b"]), on_group=settled.append)
    batch = await manager.generate_batch()
    assert {sample.group_index for sample in batch} == {1, 3}
    assert {group.reason for group in settled if group.outcome == "dropped"} == {"dull"}


async def test_an_invalid_filter_result_is_a_failure() -> None:
    """Also in an object with ``keep``."""
    manager = AsyncRolloutManager(plain(filter_fn=lambda samples: Answer(keep="yes"), patience=1), DataBuffer(["a"]))
    with pytest.raises(Exception, match="expected True or False") as raised:
        await manager.generate_batch()
    assert FilterFailure.__name__ in str(raised.value) or isinstance(raised.value, FilterFailure)


async def test_a_group_that_the_batch_needs_is_kept() -> None:
    """``keep_when_insufficient``: as many groups are dropped for a batch as are started beyond its size, no more."""

    def check(samples: Sequence[Sample]) -> Any:
        return Answer(keep=False, keep_when_insufficient=True)

    manager = AsyncRolloutManager(plain(filter_fn=check, over_sampling_factor=1.0), DataBuffer(["a", "b"]))
    assert len(await manager.generate_batch()) == 4
    assert manager.accounting.dropped == 0
    wide = AsyncRolloutManager(plain(filter_fn=check, over_sampling_factor=2.0), DataBuffer(["a", "b"]))
    assert len(await wide.generate_batch()) == 4
    assert wide.accounting.dropped == 2
    assert wide.accounting.taken == 4  # nothing starts in the place of a group that would fill the batch
    assert len(await wide.generate_batch()) == 4
    assert (wide.accounting.dropped, wide.accounting.taken) == (4, 8)


async def test_no_group_starts_while_a_server_is_away() -> None:
    """A batch waits, without taking a prompt, and is filled once the server is back."""
    manager, sizes = AsyncRolloutManager(plain(), DataBuffer(["a", "b"])), []

    async def fill() -> None:
        sizes.append(len(await manager.generate_batch()))

    async with anyio.create_task_group() as tasks:
        with listed_pause("the server is away", lambda: 0, blocks_new_work=True):
            tasks.start_soon(fill)
            await settled()
            assert manager.accounting.taken == 0
            assert [wait.what for wait in waits()] == ["no group starts during a pause"]
        with listed_pause("another pause", lambda: 0), anyio.fail_after(30):
            while not sizes:  # noqa: ASYNC110 - the manager looks once a second
                await anyio.sleep(0.01)
    assert sizes == [4]


async def test_withdrawn_groups_are_counted() -> None:
    """They leave as dropped, with their samples, and the sum still adds up."""
    manager = AsyncRolloutManager(plain(over_sampling_factor=3.0), DataBuffer(["a", "b"]))
    async with manager:
        await manager.generate_batch()
        while manager.accounting.in_flight:
            await checkpoint()
        ready = [group.group_index for group in manager.ready_groups]
        withdrawn = manager.withdraw(lambda group: group.group_index != ready[0])
        assert [group.group_index for group in withdrawn] == ready[1:]
        assert [group.group_index for group in manager.ready_groups] == ready[:1]
        manager.accounting.check()
    assert manager.accounting.dropped == len(ready) - 1
    assert manager.run_metrics.reasons == {"stale": len(ready) - 1}


async def test_rollouts_that_were_finished_elsewhere_are_taken_over() -> None:
    """Only the missing rollouts of the group are generated."""
    played: list[int | None] = []

    async def noted(prompts: Sequence[Prompt]) -> list[Sample]:
        played.append(prompts[0].index)
        return await play(prompts)

    manager = AsyncRolloutManager(plain(generate_fn=noted, over_sampling_factor=1.0), DataBuffer(["a", "b"]))
    done = Sample(tokens=[7, 8], status=Status.COMPLETED, reward=5.0, group_index=0, index=1, rollout_id=1)
    manager.add_finished_rollouts(0, {1: [done]})
    assert manager.finished_rollouts(0) == {1: [done]}
    batch = await manager.generate_batch()
    assert sorted(index for index in played if index is not None) == [0, 2, 3]
    assert batch[1].tokens == [7, 8]


async def test_a_saved_state_does_not_change_with_the_manager() -> None:
    """A checkpoint that is written later has the numbers of the moment at which it was taken."""
    async with AsyncRolloutManager(plain(), DataBuffer(["a", "b", "c"])) as manager:
        manager.run_metrics.count("kept", "", [1, 2], [0.0, 1.0])
        state = manager.state_dict()
        lengths = {outcome: [*values] for outcome, values in state["totals"]["lengths"].items()}
        await manager.generate_batch()
        manager.run_metrics.count("kept", "", [3, 4], [0.0, 1.0])
        assert state["totals"]["lengths"] == lengths


async def test_groups_that_are_put_back_stop() -> None:
    """Their prompts are in the buffer again, and the other groups continue."""
    policy = Policy()
    policy.delayed = {2: anyio.Event(), 3: anyio.Event()}
    async with manager_of(policy, ahead=2) as manager:
        await manager.generate_batch()
        assert manager.accounting.in_flight == 2
        await manager.put_back({2, 99})
        assert (manager.accounting.in_flight, manager.accounting.returned) == (1, 1)
        assert [prompt.group_index for prompt in manager.data_buffer.get_prompts(1)] == [2]
        policy.delayed.pop(3).set()
        samples = await manager.generate_batch()
        assert {sample.group_index for sample in samples} > {3}
        manager.accounting.check()


async def test_a_prompt_says_how_many_rollouts_of_its_group_have_finished() -> None:
    """At any time while it is played: here before and after the three others end."""
    found: dict[int, list[int]] = {}
    others, done = anyio.Event(), []

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.index is not None
        found[prompt.index] = [prompt.urgency()]
        if prompt.index == 3:
            await others.wait()
            await settled()
            found[3].append(prompt.urgency())
        done.append(prompt.index)
        if len(done) == 3:
            others.set()
        return [Sample(tokens=[1, 2], loss_mask=[0, 1], reward=1.0)]

    config = RolloutConfig(batch_size=1, n_samples_per_prompt=4, over_sampling_factor=1, generate_fn=generate)
    async with AsyncRolloutManager(config, DataBuffer(["a"], epochs=1)) as manager:
        await manager.generate_batch()
    assert (found[0][0], found[3][-1]) == (0, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metrics", {"turns": "two"}),
        ("loss_mask", [0, 1, 1]),
        ("loss_multiplier", float("nan")),
        ("history", "rewrite"),
        ("completions", ["a reply"]),
        ("shared", -1),
        ("conversation", True),
        ("advantages", [0.5]),
        ("reward", float("inf")),
    ],
)
async def test_a_ready_sample_is_checked_again_when_its_batch_is_sealed(field: str, value: Any) -> None:
    """A batch with a sample that was edited after its group settled is refused; mended, it is the next batch."""
    manager = AsyncRolloutManager(plain(over_sampling_factor=3.0), DataBuffer(["a", "b"]))
    async with manager:
        await manager.generate_batch()
        while manager.accounting.in_flight:
            await checkpoint()
        counts = attrs.evolve(manager.accounting)
        edited = manager.ready_groups[0].samples[-1]
        sound = getattr(edited, field)
        setattr(edited, field, value)
        with pytest.raises(ConfigError, match=r"Sample"):
            await manager.generate_batch()
        assert (manager.accounting, manager.batches) == (counts, 1)
        setattr(edited, field, sound)
        assert edited in await manager.generate_batch()
