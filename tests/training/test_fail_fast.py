"""A run whose first groups all fail for the same cause ends at once with that error; one bad prompt does not end it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from rollouts.dtypes import Prompt
from rollouts.errors import FilterFailure, GenerateFailure
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from tests.stored_runs import some_sample


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    await anyio.lowlevel.checkpoint()
    return [some_sample(prompt, prompt.index or 0) for prompt in prompts]


async def reward(sample: Sample) -> float:
    return 1.0


def manager_of(**fields: Any) -> AsyncRolloutManager:
    fixed = {"batch_size": 4, "n_samples_per_prompt": 4, "generate_fn": generate, "reward_fn": reward}
    return AsyncRolloutManager(
        RolloutConfig(**{**fixed, **fields}), DataBuffer([f"question {number}" for number in range(200)])
    )


async def no_label(sample: Sample) -> float:
    raise KeyError(f"label {sample.index}")


def no_labels(samples: list[Sample]) -> list[float]:
    raise KeyError(f"label {samples[0].index}")


def no_answer(samples: Sequence[Sample]) -> bool:
    raise KeyError(f"answer {samples[0].index}")


async def no_world(prompts: Sequence[Prompt]) -> list[Sample]:
    raise ConnectionError(f"port {prompts[0].index}")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reward_fn": no_label}, "RewardFailure: reward no_label raised KeyError: 'label "),
        ({"reward_fn": no_labels, "group_rm": True}, "RewardFailure: group reward no_labels raised KeyError: 'label "),
        ({"filter_fn": no_answer}, "FilterFailure: filter no_answer raised KeyError: 'answer "),
        ({"generate_fn": no_world}, "GenerateFailure: generate_fn no_world raised ConnectionError: port "),
    ],
    ids=["reward", "group reward", "filter", "generate"],
)
@pytest.mark.parametrize("size", [{}, {"batch_size": 1, "over_sampling_factor": 1}], ids=["batch", "one group"])
async def test_first_groups_that_fail_alike_end_the_run(fields: dict[str, Any], size: Any, reason: str) -> None:
    """The error is that of the samples; no prompt is taken after the groups that were in flight."""
    manager = manager_of(**fields, **size)
    async with manager:
        with pytest.raises(GenerateFailure, match="all groups failed alike, from the first on") as caught:
            await manager.generate_batch()
    assert reason in str(caught.value)
    assert manager.accounting.taken == manager.accounting.failed == manager.config.max_inflight_groups
    manager.accounting.check()


async def test_one_bad_prompt_does_not_end_the_run() -> None:
    """Every sample of the first group fails at once, while the other groups take their time."""

    async def first_is_bad(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index == 0:
            raise ValueError("no such file")
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        return await generate(prompts)

    async with manager_of(generate_fn=first_is_bad) as manager:
        batch = await manager.generate_batch()
    assert 0 not in {sample.group_index for sample in batch}
    assert manager.accounting.failed == 1


async def test_failures_for_different_reasons_are_a_matter_of_patience() -> None:
    """They do not prove that nothing can succeed."""
    kinds = (ValueError, OSError, KeyError)

    async def unlucky(prompts: Sequence[Prompt]) -> list[Sample]:
        raise kinds[(prompts[0].group_index or 0) % 3]("unlucky")

    async with manager_of(generate_fn=unlucky, patience=20) as manager:
        with pytest.raises(GenerateFailure, match=r"of the last \d+ groups failed, none was accepted"):
            await manager.generate_batch()
    assert manager.accounting.failed >= 20


async def test_one_lost_rollout_does_not_end_the_run() -> None:
    """With one group in flight, whose first rollout fails, the run continues."""

    async def first_is_bad(prompts: Sequence[Prompt]) -> list[Sample]:
        if (prompts[0].group_index or 0) < 2 and (prompts[0].index or 0) % 4 == 0:
            raise ValueError("unlucky")
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        return await generate(prompts)

    manager = manager_of(generate_fn=first_is_bad, batch_size=1, over_sampling_factor=1, max_attempts=1)
    async with manager:
        assert len(await manager.generate_batch()) == 4
    assert manager.accounting.failed == 2


async def test_after_a_success_patience_counts() -> None:
    """Groups whose reward fails later are not the first groups."""
    scored = 0

    async def later(sample: Sample) -> float:
        nonlocal scored
        scored += 1
        if scored > 40:
            raise KeyError("label")
        return 1.0

    async with manager_of(reward_fn=later, patience=10, max_attempts=1) as manager:
        await manager.generate_batch()
        await manager.generate_batch()
        with pytest.raises(GenerateFailure, match=r"of the last \d+ groups failed, none was accepted"):
            await manager.generate_batch()
    assert manager.accounting.failed >= 10


@pytest.mark.parametrize(
    ("good", "fields", "state", "error"),
    [
        (0, {}, "0 dropped", "all groups failed alike, from the first on"),
        (1, {"batch_size": 1}, "1 in batch", r"of the last \d groups failed, none was accepted"),
        (1, {}, "1 ready", r"of the last \d groups failed, none was accepted"),
        (
            1,
            {"batch_size": 1, "filter_fn": lambda samples: False},
            "1 dropped",
            r"of the last \d groups failed, none was accepted",
        ),
    ],
    ids=["nothing", "in a batch", "ready", "dropped"],
)
async def test_a_success_before_a_restore_counts(good: int, fields: dict[str, Any], state: str, error: str) -> None:
    """Whether patience decides is the same in the run that continues: one kept or dropped group is a success."""

    async def then_bad(prompts: Sequence[Prompt]) -> list[Sample]:
        samples = await generate(prompts)
        if (prompts[0].group_index or 0) < good:
            return samples
        await anyio.wait_all_tasks_blocked()  # the good group is settled first
        raise ValueError("no such file")

    config = {"batch_size": 2, "n_samples_per_prompt": 1, "max_attempts": 1, "generate_fn": then_bad, "patience": 3}
    before = manager_of(**{**config, "over_sampling_factor": 1, "patience": 1, **fields})
    with contextlib.suppress(GenerateFailure, FilterFailure):
        await before.generate_batch()
    assert state in str(before.accounting)
    after = manager_of(**config)
    after.load_state_dict(before.state_dict())
    with pytest.raises(GenerateFailure, match=error):
        await after.generate_batch()


async def test_dropped_groups_count_as_success() -> None:
    """A filter that keeps nothing is a matter of patience; the error has the mean reward."""
    async with manager_of(filter_fn=lambda samples: False, patience=9) as manager:
        with pytest.raises(FilterFailure, match=r"accepted none of the last.*; mean reward 1\. "):
            await manager.generate_batch()


async def test_the_message_about_the_filter_names_the_rewards_since_the_last_error() -> None:
    """Rewards of groups before the last error of the run are not mixed with those of the groups after it."""
    mean = iter([0.0, *[None] * 4, *[1.0] * 5])
    means: dict[int, float | None] = {}

    def scored(samples: list[Sample]) -> list[float]:
        index = samples[0].group_index
        assert index is not None
        value = means.setdefault(index, next(mean))
        if value is None:
            raise KeyError("label")
        return [value] * len(samples)

    def keeps_none(samples: Sequence[Sample]) -> bool:
        return False

    manager = manager_of(
        reward_fn=scored, group_rm=True, filter_fn=keeps_none, patience=5, batch_size=1, over_sampling_factor=1
    )
    async with manager:
        with pytest.raises(GenerateFailure, match="4 of the last 5 groups failed"):
            await manager.generate_batch()
        with pytest.raises(FilterFailure, match="every reward was 1, so there is nothing to learn"):
            await manager.generate_batch()
