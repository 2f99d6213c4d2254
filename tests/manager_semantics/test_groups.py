"""The law book of the group scheduler, section 1: law 5, groups.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
import pytest

from rollouts.dtypes import StopReason
from rollouts.errors import (
    GenerateFailure,
)
from rollouts.training import (
    Prompt,
    Sample,
)
from tests.manager_semantics.world import (
    PLAIN,
    answer_at_once,
    manager_of,
    play,
    rollouts_of,
    sample_for,
    slow_first,
)


async def test_a_filter_sees_the_rollouts_of_one_prompt() -> None:
    """1.1 Groups are formed by prompt, never by order of arrival (the original: 12 of 12 groups were mixed)."""
    scene = attrs.evolve(PLAIN, batch_size=8, n=4, longest=50, batches=2)
    seen: list[list[Sample]] = []

    def note(samples: list[Sample]) -> bool:
        seen.append(list(samples))
        return True

    await play(scene, filter_fn=note)
    assert len(seen) >= 16
    for samples in seen:
        assert len({sample.prompt for sample in samples}) == 1
        assert len(rollouts_of(samples)) == 4


async def test_a_batch_holds_whole_groups_only() -> None:
    """1.2 Selection takes groups, not samples (the original left 10 of 11 prompts with a part of their rollouts)."""
    _, till, batches = await play(attrs.evolve(PLAIN, batch_size=5, n=4, longest=60))
    for batch in batches:
        sizes = Counter(group for group, _ in {(sample.group_index, sample.index) for sample in batch})
        assert set(sizes.values()) == {4}
    assert len(batches) == 3
    assert till.out.total() >= 15


@pytest.mark.parametrize("context", [True, False])
async def test_a_group_index_is_never_given_to_two_prompts(context: bool) -> None:
    """1.3 Across refills, batches and epochs (the original's second batch had 6 of 11 ids with several prompts)."""
    scene = attrs.evolve(PLAIN, prompts=5, batches=6, context=context, longest=10, rejects=0.3)
    _, till, batches = await play(scene)
    of_batches = [group for batch in batches for group in {sample.group_index for sample in batch}]
    assert len(of_batches) == len(set(of_batches)) == 24
    assert set(till.out) == set(range(max(till.out) + 1)), "no number is skipped"


async def test_order_is_that_of_the_prompts_not_of_arrival() -> None:
    """1.4 A batch is ordered by group index, then index, though the last started finishes first."""
    async with manager_of(slow_first, over_sampling_factor=1) as manager:
        batch = await manager.generate_batch()
    assert [(sample.group_index, sample.index) for sample in batch] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]


async def test_a_fork_is_one_rollout_of_its_group() -> None:
    """1.5 A rollout may return several samples; they stay together and share its rollout id and its reward.

    The reward is that of the last branch; branches that ended in a fork are not scored.
    """

    async def fork(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        assert request.index is not None
        samples = [sample_for(request, length=1 + part) for part in range(1 + request.index % 3)]
        for branch in samples[:-1]:
            branch.stop_reason = StopReason.FORKED
        return samples

    def score(sample: Sample) -> float:
        scored.append((sample.index, len(sample)))
        return float(sample.index or 0)

    scored: list[tuple[int | None, int]] = []
    batch = await manager_of(fork, n_samples_per_prompt=3, reward_fn=score).generate_batch()
    assert [sample.rollout_id for sample in batch] == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 6, 7, 7, 8, 8, 8]
    assert [len(sample) for sample in batch[3:6]] == [2, 3, 4], "branches in the order they were given"
    assert [sample.reward for sample in batch] == [sample.rollout_id for sample in batch]
    assert sorted(scored)[:3] == [(0, 2), (1, 3), (2, 4)]


async def test_a_group_of_one() -> None:
    """1.6 One rollout a prompt is a group too."""
    batch = await manager_of(answer_at_once, n_samples_per_prompt=1, reward_fn=lambda sample: 0.5).generate_batch()
    assert len(batch) == 3
    assert all(sample.index == sample.group_index for sample in batch)


async def test_one_sample_object_is_one_rollout() -> None:
    """1.7 A generate function that returns the same sample twice has failed, also within one rollout."""
    shared: list[Sample] = []

    async def cached(prompts: Sequence[Prompt]) -> list[Sample]:
        shared.extend([sample_for(prompts[0], reward=1.0)] if not shared else [])
        return shared

    async def twice(prompts: Sequence[Prompt]) -> list[Sample]:
        return [sample_for(prompts[0], reward=1.0)] * 2

    for generate, whose in ((cached, "rollout"), (twice, "each branch")):
        manager = manager_of(generate, patience=4)
        with pytest.raises(GenerateFailure, match=f"expected a new Sample for {whose}"):
            await manager.generate_batch()
        assert manager.accounting.in_batch == 0
