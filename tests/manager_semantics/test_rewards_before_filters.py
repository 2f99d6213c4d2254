"""The law book of the group scheduler, section 2: rewards come before filters.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

import pytest

from rollouts.training import (
    Sample,
    Status,
    check_reward_nonzero_std,
)
from tests.manager_semantics.world import (
    ODD_ANSWERS,
    answer_at_once,
    manager_of,
    only_bad_in_group_zero,
)


@pytest.mark.parametrize("whole", [False, True])
async def test_the_filter_runs_after_every_reward(whole: bool) -> None:
    """2.1 A filter sees final rewards (the original's saw [0.0, 0.0] for a batch with 0.2 to 0.84)."""
    seen: list[list[float | None]] = []

    def reward(sample: Sample) -> float:
        assert sample.index is not None
        return sample.index / 100

    def rewards(samples: list[Sample]) -> list[float]:
        return [reward(sample) for sample in samples]

    def note(samples: list[Sample]) -> bool:
        seen.append([sample.reward for sample in samples])
        return check_reward_nonzero_std(samples)

    scored = {"reward_fn": rewards if whole else reward, "group_rm": whole}
    manager = manager_of(answer_at_once, filter_fn=note, over_sampling_factor=1, **scored)
    batch = await manager.generate_batch()
    assert sorted(seen) == [[0.0, 0.01], [0.02, 0.03], [0.04, 0.05]]
    assert [sample.reward for sample in batch] == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert manager.accounting.dropped == 0


async def test_a_group_without_spread_is_dropped_and_replaced() -> None:
    """2.2 The filter of slime works on the rewards of our groups: equal ones are dropped, the batch is still full."""

    def reward(sample: Sample) -> float:
        assert sample.group_index is not None
        return float(sample.index or 0) if sample.group_index % 2 else 1.0

    manager = manager_of(answer_at_once, reward_fn=reward, filter_fn=check_reward_nonzero_std)
    batch = await manager.generate_batch()
    assert len({sample.group_index for sample in batch}) == 3
    assert all(sample.group_index % 2 for sample in batch if sample.group_index is not None)
    assert manager.accounting.dropped >= 1


async def test_a_filter_written_with_torch_runs_unchanged() -> None:
    """2.3 The result of a filter may be a scalar of a tensor or an array."""
    for yes in ODD_ANSWERS:
        batch = await manager_of(answer_at_once, filter_fn=lambda samples, yes=yes: yes).generate_batch()
        assert len(batch) == 6


async def test_a_filter_never_sees_a_group_that_failed() -> None:
    """2.4 Failed groups do not reach the filter."""
    seen: list[int | None] = []

    def note(samples: list[Sample]) -> bool:
        seen.append(samples[0].group_index)
        return all(sample.status is Status.COMPLETED for sample in samples)

    manager = manager_of(only_bad_in_group_zero(lambda request: []), filter_fn=note)
    await manager.generate_batch()
    assert 0 not in seen
    assert manager.accounting.dropped == 0
