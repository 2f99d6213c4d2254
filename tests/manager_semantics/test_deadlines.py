"""The law book of the group scheduler, section 6: law 7, deadlines.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.to_thread
import pytest

from rollouts.errors import (
    GenerateFailure,
)
from rollouts.training import (
    Prompt,
    Sample,
    Status,
)
from tests.manager_semantics.world import (
    answer_at_once,
    hang_in_group_zero,
    manager_of,
    never,
    run_with_bad_group_zero,
)


async def test_a_hung_rollout_is_cut() -> None:
    """6.1 At ``rollout_seconds``; the batch does not wait for it."""
    _, failed = await run_with_bad_group_zero(generate_fn=hang_in_group_zero, rollout_seconds=0.05, max_attempts=1)
    assert "did not answer within 0.05 s" in failed.reason


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
async def test_a_late_reward_is_a_failure(whole: bool, threaded: bool) -> None:
    """6.2 At ``reward_seconds``, also when it blocks a thread: never a zero, never a wait for ever."""
    release = threading.Event()

    def blocking(given: Any) -> Any:
        samples = given if whole else [given]
        if samples[0].group_index == 0:
            release.wait(30)
        return [1.0] * len(samples) if whole else 1.0

    async def hanging(given: Any) -> Any:
        if (given if whole else [given])[0].group_index == 0:
            await anyio.sleep_forever()
        return [1.0] * len(given) if whole else 1.0

    try:
        _, failed = await run_with_bad_group_zero(
            reward_fn=blocking if threaded else hanging, group_rm=whole, reward_seconds=0.3, max_attempts=1
        )
    finally:
        release.set()
    assert failed.reason.startswith("RewardFailure: ")
    assert "did not answer within" in failed.reason


async def test_a_hung_filter_is_cut() -> None:
    """6.3 At ``filter_seconds``."""
    release = threading.Event()

    def check(samples: list[Sample]) -> bool:
        return release.wait(30) if samples[0].group_index == 0 else True

    try:
        _, failed = await run_with_bad_group_zero(filter_fn=check, filter_seconds=0.3)
    finally:
        release.set()
    assert failed.reason.startswith("FilterFailure: ")


async def test_an_answer_after_the_deadline_is_late() -> None:
    """6.4 A reward function that swallows its deadline and returns 0.0 fails (a source of silent wrong labels)."""

    async def reward(sample: Sample) -> float:
        try:
            if sample.group_index == 0:
                await anyio.sleep_forever()
        except BaseException:  # noqa: BLE001 - the subject
            return 0.0
        return 1.0

    _, failed = await run_with_bad_group_zero(reward_fn=reward, reward_seconds=0.05, max_attempts=1)
    assert "did not answer within" in failed.reason


async def test_the_run_can_say_what_it_waits_for() -> None:
    """6.5 A wait is reported with its group, its operation, its start, its deadline and its source line."""
    manager = manager_of(hang_in_group_zero, batch_size=1, over_sampling_factor=3, n_samples_per_prompt=1)
    async with manager:
        await manager.generate_batch()
        (waiting,) = manager.waiting_for(count=5)
        assert waiting.startswith("group 0 · sample 0: generate_fn hang_in_group_zero for ")
        assert " s left, in " in waiting
        assert waiting.endswith(" in never")
    assert manager.waiting_for() == []


async def test_waiting_for_a_thread_does_not_count_against_the_deadline() -> None:
    """6.6 A deadline covers the function, not the wait for a worker thread."""
    anyio.to_thread.current_default_thread_limiter().total_tokens = 1
    turn = threading.Event()

    def reward(sample: Sample) -> float:
        turn.wait(0.02)
        return 1.0

    manager = manager_of(answer_at_once, reward_fn=reward, reward_seconds=0.2, batch_size=5, n_samples_per_prompt=4)
    assert len(await manager.generate_batch()) == 20
    assert manager.accounting.failed == 0


async def test_a_hung_group_is_cut() -> None:
    """6.7 At ``group_seconds``, over all attempts; the group is recorded with the rollouts that it has finished."""

    async def hang_in_one(prompts: Sequence[Prompt]) -> list[Sample]:
        return await (never if prompts[0].index == 1 else answer_at_once)(prompts)

    manager, failed = await run_with_bad_group_zero(generate_fn=hang_in_one, group_seconds=0.05)
    assert failed.reason == "GenerateFailure: the group was not finished within 0.05 s"
    assert [sample.status is Status.FAILED for sample in failed.samples][:2] == [False, True]
    assert manager.failures.lost["deadline"] == 1


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_batch_that_is_not_filled_in_time_says_so(is_open: bool) -> None:
    """6.8 At ``batch_seconds``; accepted groups remain for the next call, and no prompt is lost."""
    release = anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index == 1:
            await release.wait()
        return await answer_at_once(prompts)

    manager = manager_of(generate, batch_size=2, over_sampling_factor=1, batch_seconds=0.3)
    async with manager if is_open else contextlib.nullcontext():
        with pytest.raises(GenerateFailure, match=r"1 of 2 groups were accepted within 0.3 s; they are kept"):
            await manager.generate_batch()
        release.set()
        batch = await manager.generate_batch()
    assert {sample.group_index for sample in batch} == {0, 1}
    manager.accounting.check()
