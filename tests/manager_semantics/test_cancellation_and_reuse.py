"""The law book of the group scheduler, section 7: cancellation and reuse.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import attrs
import pytest
from anyio.lowlevel import checkpoint

from rollouts.concurrency.cancellation import left_behind
from rollouts.training import (
    AsyncRolloutManager,
    Prompt,
    Sample,
)
from tests.manager_semantics.world import (
    PLAIN,
    answer_at_once,
    check_batch,
    hang_in_group_zero,
    manager_of,
    never,
    play,
    points,
    questions,
    rollouts_of,
    slow_first,
)


async def two_of_three(prompts: Sequence[Prompt]) -> list[Sample]:
    """Every third rollout never ends."""
    assert prompts[0].index is not None
    return await (never if prompts[0].index % 3 == 2 else answer_at_once)(prompts)


async def test_what_is_finished_survives_a_cancellation() -> None:
    """7.1 After a cancelled batch, the next one generates only rollouts that were not finished."""
    calls: Counter[int | None] = Counter()
    stuck = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        calls[prompts[0].index] += 1
        return await (two_of_three if stuck else answer_at_once)(prompts)

    manager = manager_of(generate, n_samples_per_prompt=3, over_sampling_factor=1)
    with anyio.move_on_after(0.05) as scope:
        await manager.generate_batch()
    assert scope.cancelled_caught
    assert (manager.accounting.returned, manager.accounting.in_flight) == (3, 0)
    stuck = False
    batch = await manager.generate_batch()
    assert rollouts_of(batch) == list(range(9))
    assert [calls[index] for index in range(9)] == [1, 1, 2] * 3


async def test_a_cancelled_wait_in_the_context_cancels_no_rollout() -> None:
    """7.2 Inside ``async with`` the rollouts outlive a cancelled batch."""
    calls: Counter[int | None] = Counter()
    go = anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        calls[prompts[0].index] += 1
        await go.wait()
        return await answer_at_once(prompts)

    async with manager_of(generate) as manager:
        with anyio.move_on_after(0.02):
            await manager.generate_batch()
        assert manager.accounting.in_flight == 6
        go.set()
        assert len(await manager.generate_batch()) == 6
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("context", [True, False])
async def test_cancellations_of_plain_asyncio_work_too(context: bool) -> None:
    """7.3 ``asyncio.timeout`` around a batch ends as a timeout, and leaves nothing behind."""
    manager = manager_of(never)
    async with AsyncExitStack() as stack:
        if context:
            await stack.enter_async_context(manager)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await manager.generate_batch()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert manager.accounting.in_flight == 0
    assert manager.accounting.returned == manager.accounting.taken == 6


async def test_a_batch_that_is_counted_is_handed_out() -> None:
    """7.4 A cancellation at the very end of a batch does not swallow it: its groups are ready for the next."""
    for after in range(40):
        manager = manager_of(slow_first, n_samples_per_prompt=1, batch_size=1, over_sampling_factor=3)
        batches: list[list[Sample]] = []

        async def fill(manager: AsyncRolloutManager = manager, batches: list[list[Sample]] = batches) -> None:
            batches.append(await manager.generate_batch())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill)
            await points(40 + after)
            tasks.cancel_scope.cancel()
        assert manager.accounting.in_batch == len(batches)
        assert manager.accounting.in_flight == 0


async def test_a_manager_closes_over_a_rollout_that_swallows_every_cancellation() -> None:
    """7.12 It is abandoned and counted, its prompt goes back, and the accounting adds up."""

    async def stubborn(prompts: Sequence[Prompt]) -> list[Sample]:
        while prompts[0].group_index == 0:
            with contextlib.suppress(asyncio.CancelledError):
                await anyio.sleep_forever()
        return [Sample(tokens=[1], loss_mask=[1], reward=1.0) for _ in prompts]

    manager = manager_of(stubborn, batch_size=1, over_sampling_factor=2, n_samples_per_prompt=1)
    before = len(left_behind())
    with anyio.fail_after(60):
        async with manager:
            await manager.generate_batch()
    assert len(left_behind()) == before + 1
    left_behind()[-1].awaitable.close()  # type: ignore[attr-defined]  # or it would live until the interpreter ends
    assert (manager.accounting.in_batch, manager.accounting.returned, manager.accounting.in_flight) == (1, 1, 0)
    manager.accounting.check()


async def test_a_swallowed_cancellation_is_no_reward() -> None:
    """7.5 A reward of 0.0 that is returned because the manager closed is void; the rollout is scored again."""
    closing = True

    async def reward(sample: Sample) -> float:
        try:
            await (anyio.sleep_forever() if closing else checkpoint())
        except BaseException:  # noqa: BLE001 - the subject
            return 0.0
        return 1.0

    manager = manager_of(answer_at_once, reward_fn=reward)
    with anyio.move_on_after(0.02):
        await manager.generate_batch()
    closing = False
    assert {sample.reward for sample in await manager.generate_batch()} == {1.0}


async def test_a_closed_manager_goes_on_where_it_was() -> None:
    """7.6 Closing returns groups in flight; after reopening, the same group indices come out, none twice."""
    scene = attrs.evolve(PLAIN, batches=8, cut=1.0, longest=40)
    _, till, _ = await play(scene)
    assert till.back.total() > 0


async def test_an_error_of_the_body_comes_out_as_it_is() -> None:
    """7.7 In no exception group, whatever was in flight."""
    manager = manager_of(hang_in_group_zero)

    async def body() -> None:
        async with manager:
            await manager.generate_batch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    assert manager.accounting.in_flight == 0
    assert manager.accounting.returned >= 1


async def test_an_open_manager_is_not_opened_again() -> None:
    """7.8 The attempt raises, and the manager stays usable."""
    async with manager_of(answer_at_once) as manager:
        with pytest.raises(RuntimeError, match="open already"):
            await manager.__aenter__()
        assert len(await manager.generate_batch()) == 6


async def test_two_batches_at_once_share_nothing() -> None:
    """7.9 Two batches that are requested concurrently are disjoint and whole."""
    batches: list[list[Sample]] = []

    async def fill() -> None:
        batches.append(await manager.generate_batch())

    async with manager_of(slow_first) as manager, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(fill)
    groups = [group for batch in batches for group in check_batch(batch, manager.config, _texts(50))]
    assert len(set(groups)) == len(groups) == 9
    manager.accounting.check()


def _texts(count: int) -> dict[int, str]:
    return dict(enumerate(questions(count)))


async def test_closing_during_a_batch_raises() -> None:
    """7.10 A task that waits for a batch gets an error when another task closes the manager."""
    manager = manager_of(never)
    errors: list[str] = []

    async def fill() -> None:
        try:
            await manager.generate_batch()
        except RuntimeError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as tasks, manager:
        tasks.start_soon(fill)
        await points(5)
    assert errors == ["the manager was closed while this batch was being filled"]
    assert manager.accounting.in_flight == 0


def test_a_manager_outlives_its_event_loop() -> None:
    """7.11 One manager, several loops, one after the other, also after a cancelled batch."""
    stuck = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        return await (two_of_three if stuck else answer_at_once)(prompts)

    async def cut() -> None:
        with anyio.move_on_after(0.02):
            async with manager:
                while True:
                    await manager.generate_batch()

    manager = manager_of(generate, n_samples_per_prompt=1)
    for _ in range(3):
        stuck = True
        asyncio.run(cut())
        stuck = False
        assert len(asyncio.run(manager.generate_batch())) == 3
    manager.accounting.check()
