"""The law book of the group scheduler, section 4: law 6, a bad rollout is data.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

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
    BROKEN_RETURNS,
    BROKEN_REWARDS,
    NO_ANSWERS,
    _raise,
    answer_at_once,
    exceptions_of_guests,
    manager_of,
    never,
    of_name,
    only_bad_in_group_zero,
    run_with_bad_group_zero,
    sample_for,
)


@pytest.mark.parametrize("error", exceptions_of_guests(), ids=of_name)
async def test_what_generation_raises_costs_its_group_only(error: BaseException) -> None:
    """4.1 Whatever it is; it is attributed, and its traceback is kept with the group."""
    _, failed = await run_with_bad_group_zero(generate_fn=only_bad_in_group_zero(lambda request: _raise(error)))
    failures = [sample.failure for sample in failed.samples if sample.failure]
    assert failures
    for failure in failures:
        assert failure.kind in ("GenerateFailure", type(error).__name__)
        assert failure.place.startswith("group 0 · sample ")
        assert type(error).__name__ in failure.traceback


@pytest.mark.parametrize("what", BROKEN_RETURNS)
async def test_a_return_that_is_no_rollout_costs_its_group_only(what: str) -> None:
    """4.2 Wrong types, no samples, lost statuses, malformed columns: never a crash, never in a batch."""
    generate = only_bad_in_group_zero(BROKEN_RETURNS[what])
    _, failed = await run_with_bad_group_zero(generate_fn=generate, reward_fn=lambda sample: 1.0)
    assert failed.reason.startswith("GenerateFailure: ")
    assert all(sample.to_dict() for sample in failed.samples), "the record can be written down"


@pytest.mark.parametrize("value", BROKEN_REWARDS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("whole", [False, True])
async def test_a_reward_that_is_no_number_costs_its_group_only(value: Any, whole: bool) -> None:
    """4.3 None, NaN, infinity, text and the rest are failures, never a zero."""

    def reward(sample: Sample) -> Any:
        return value if sample.group_index == 0 else 1.0

    def rewards(samples: list[Sample]) -> Any:
        return [1.0, value] if samples[0].group_index == 0 else [1.0, 1.0]

    _, failed = await run_with_bad_group_zero(reward_fn=rewards if whole else reward, group_rm=whole)
    assert failed.reason.startswith("RewardFailure: ")
    assert "expected a finite number" in failed.reason


@pytest.mark.parametrize("error", exceptions_of_guests()[:-1], ids=of_name)
@pytest.mark.parametrize("whole", [False, True])
async def test_what_a_reward_raises_costs_its_group_only(error: BaseException, whole: bool) -> None:
    """4.4 In a thread, once for a sample or once for the group."""

    def reward(given: Any) -> Any:
        samples = given if whole else [given]
        if samples[0].group_index == 0:
            raise error
        return [1.0] * len(samples) if whole else 1.0

    _, failed = await run_with_bad_group_zero(reward_fn=reward, group_rm=whole)
    assert failed.reason.startswith(("RewardFailure: ", "EndpointUnavailable: "))


@pytest.mark.parametrize("given", [None, 1.0, [], [1.0], [1.0] * 3, {0: 1.0, 1: 1.0}, "11"], ids=repr)
async def test_a_group_reward_gives_one_number_for_each_sample(given: Any) -> None:
    """4.5 Fewer, more or something else fails the group."""

    def rewards(samples: list[Sample]) -> Any:
        return given if samples[0].group_index == 0 else [0.5, 0.5]

    await run_with_bad_group_zero(reward_fn=rewards, group_rm=True)


@pytest.mark.parametrize("error", exceptions_of_guests()[:-1], ids=of_name)
async def test_what_a_filter_raises_costs_its_group_only(error: BaseException) -> None:
    """4.6 A filter that raises has failed its group, not rejected it."""

    def check(samples: list[Sample]) -> bool:
        return bool(_raise(error)) if samples[0].group_index == 0 else True

    manager, _ = await run_with_bad_group_zero(filter_fn=check)
    assert manager.accounting.dropped == 0


@pytest.mark.parametrize("answer", NO_ANSWERS, ids=lambda answer: type(answer).__name__)
async def test_a_filter_answers_with_a_bool(answer: Any) -> None:
    """4.7 None, numbers and arrays are invalid: a forgotten ``return`` does not drop everything silently."""

    def check(samples: list[Sample]) -> Any:
        return answer if samples[0].group_index == 0 else True

    _, failed = await run_with_bad_group_zero(filter_fn=check)
    assert failed.reason.startswith("FilterFailure: ")


async def test_a_rollout_is_tried_again_before_it_is_lost() -> None:
    """4.8 ``max_attempts`` times, from the start; the others of its group are not repeated."""
    calls: Counter[int | None] = Counter()

    async def flaky(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        calls[request.index] += 1
        if request.index == 1 and calls[1] < 3:
            raise ConnectionError("reset")
        return [sample_for(request, reward=1.0)]

    batch = await manager_of(flaky, max_attempts=3, over_sampling_factor=1).generate_batch()
    assert calls == {0: 1, 1: 3, 2: 1, 3: 1, 4: 1, 5: 1}
    assert [sample.metrics["attempts"] for sample in batch] == [1, 3, 1, 1, 1, 1]
    assert all(sample.failure is None for sample in batch)


async def test_the_siblings_of_a_lost_rollout_stop() -> None:
    """4.9 Its group cannot become complete, so its siblings are cancelled."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        if request.index == 0:
            raise ValueError("lost")
        return await (never if request.index == 1 else answer_at_once)(prompts)

    await run_with_bad_group_zero(generate_fn=generate)


async def test_a_failure_can_stop_the_run() -> None:
    """4.10 With ``on_failure="stop"`` the first group lost ends the batch, and is still accounted for."""
    manager = manager_of(only_bad_in_group_zero(lambda request: _raise(ValueError("no"))), on_failure="stop")
    with pytest.raises(GenerateFailure, match=r"group 0 failed: GenerateFailure: .*ValueError: no"):
        await manager.generate_batch()
    assert manager.accounting.failed == 1
    assert manager.accounting.in_flight == 0
    assert len(await manager.generate_batch()) == 6, "and the next call works"


async def test_one_failure_does_not_poison_the_next_call() -> None:
    """4.11 After a batch that ended in an error the manager works as before (slime's next call fails as well)."""
    angry = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if angry:
            raise RuntimeError("down")
        return await answer_at_once(prompts)

    manager = manager_of(generate, patience=2)
    for _ in range(3):
        with pytest.raises(GenerateFailure, match="down"):
            await manager.generate_batch()
    angry = False
    assert len(await manager.generate_batch()) == 6


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
async def test_a_reward_may_give_a_sample_up(status: Status) -> None:
    """4.12 A status that the reward function sets counts as the status of the rollout."""

    def reward(sample: Sample) -> float:
        if sample.group_index == 0:
            sample.status = status
        return 1.0

    _, failed = await run_with_bad_group_zero(reward_fn=reward)
    assert f"ended {status.value}" in failed.reason


@pytest.mark.parametrize("where", ["reward_fn", "filter_fn"])
async def test_a_column_spoiled_by_a_guest_costs_its_group_only(where: str) -> None:
    """4.13 Rewards and filters may edit masks; an edit that breaks a column fails its group, not the batch."""

    def spoil(given: Any) -> Any:
        for sample in given if isinstance(given, list) else [given]:
            if sample.group_index == 0:
                sample.loss_mask = [*sample.loss_mask, 7]
        return True

    await run_with_bad_group_zero(**{where: spoil})


async def test_an_edit_of_the_mask_survives() -> None:
    """4.14 A mask assigned by a reward arrives in the batch."""

    def reward(sample: Sample) -> float:
        sample.loss_mask = [0, 0, 1]
        return 1.0

    batch = await manager_of(answer_at_once, reward_fn=reward).generate_batch()
    assert all(sample.loss_mask == [0, 0, 1] for sample in batch)


@pytest.mark.parametrize(
    "field",
    [
        {"metrics": {"note": "hi"}},
        {"metrics": {"note": math.nan}},
        {"metrics": None},
        {"completions": ["call"]},
        {"versions": ["3"]},
        {"step_rewards": [0.5, math.nan]},
        {"step_rewards": ["0.5"]},
        {"step_rewards": None},
    ],
)
async def test_records_of_another_kind_are_refused_with_their_rollout(field: dict[str, Any]) -> None:
    """4.15 A value that would break the metrics of a batch, or its file, fails its own rollout."""

    def bad(request: Prompt) -> list[Sample]:
        sample = sample_for(request, reward=1.0)
        for name, value in field.items():
            setattr(sample, name, value)
        return [sample]

    await run_with_bad_group_zero(generate_fn=only_bad_in_group_zero(bad))
