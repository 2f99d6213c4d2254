"""Groups that run: how many start and are cancelled in one turn of the event loop, and in which order."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample
from rollouts.training.running_groups import GROUPS_A_TURN, RunningGroups


def manager_of(generate: object, *, batch: int, ahead: float) -> AsyncRolloutManager:
    config = RolloutConfig(
        batch_size=batch,
        n_samples_per_prompt=2,
        over_sampling_factor=ahead,
        generate_fn=generate,  # type: ignore[arg-type]
    )
    return AsyncRolloutManager(config, DataBuffer([str(number) for number in range(200)]))


async def test_groups_end_a_few_in_a_turn_and_the_newest_first() -> None:
    """A slot that a group gives back starts no older rollout that would be cancelled next; no turn ends them all."""
    groups, turns = RunningGroups(), [0]
    ended: list[tuple[int, int]] = []

    async def run(index: int, scope: anyio.CancelScope) -> None:
        with scope:
            await anyio.sleep_forever()
        ended.append((index, turns[0]))
        groups.end(index)

    async def count() -> None:
        while True:
            await checkpoint()
            turns[0] += 1

    async with anyio.create_task_group() as around:
        around.start_soon(count)
        tasks = await anyio.create_task_group().__aenter__()
        for index in range(5 * GROUPS_A_TURN):
            tasks.start_soon(run, index, groups.begin(index))
        await checkpoint()
        await groups.end_all(tasks)
        around.cancel_scope.cancel()
    assert [index for index, _ in ended] == [
        index
        for start in range(4, -1, -1)
        for index in range((start + 1) * GROUPS_A_TURN - 1, start * GROUPS_A_TURN - 1, -1)
    ]
    assert len({turn for _, turn in ended}) == 5


async def test_a_stream_starts_all_its_groups_while_the_caller_trains() -> None:
    """More groups than start in one turn of the event loop need no end of another group to start."""
    started: list[int | None] = []
    held = anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        started.append(prompts[0].group_index)
        if (prompts[0].group_index or 0) >= 3 * GROUPS_A_TURN:
            await held.wait()
        return [Sample(tokens=[1, 2], loss_mask=[0, 1], reward=1.0)]

    async with manager_of(generate, batch=3 * GROUPS_A_TURN, ahead=2) as manager:
        stream = manager.stream()
        await anext(stream)
        await anyio.wait_all_tasks_blocked()
        assert manager.accounting.in_flight == 6 * GROUPS_A_TURN
        assert len(set(started)) == 9 * GROUPS_A_TURN
        await stream.aclose()


async def test_a_cancelled_rollout_leaves_no_cycle() -> None:
    """The frames of rollouts that the end of a run cancels are freed at once, not by a collection of all objects."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index:
            await anyio.sleep_forever()
        return [Sample(tokens=[1, 2], loss_mask=[0, 1], reward=1.0)]

    def cancellations() -> list[Any]:
        return [one for one in gc.get_objects() if type(one) is anyio.get_cancelled_exc_class()]

    gc.collect()
    gc.disable()
    before = cancellations()  # that earlier tests have left
    try:
        async with manager_of(generate, batch=1, ahead=40) as manager:
            await manager.generate_batch()
            await anyio.wait_all_tasks_blocked()  # all have started
            assert manager.accounting.in_flight == 39
        left = cancellations()
    finally:
        gc.enable()
    new = [one for one in left if all(one is not old for old in before)]
    assert len(new) <= 3 * GROUPS_A_TURN, "those of the last turn, of a group and two rollouts each, which anyio keeps"
