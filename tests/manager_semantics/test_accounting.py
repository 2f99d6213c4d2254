"""The law book of the group scheduler, section 3: law 4, accounting.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from rollouts.errors import (
    FilterFailure,
    GenerateFailure,
)
from rollouts.training import (
    Prompt,
    Sample,
)
from tests.manager_semantics.world import (
    OUTCOMES,
    PLAIN,
    answer_at_once,
    manager_of,
    only_bad_in_group_zero,
    play,
    sample_for,
)


async def test_the_run_can_print_its_sum() -> None:
    """3.1 Every prompt taken is named in the sum, and the sum is right."""
    manager = manager_of(
        only_bad_in_group_zero(lambda request: []), filter_fn=lambda samples: samples[0].group_index != 1
    )
    await manager.generate_batch()
    counts = manager.accounting
    assert (counts.failed, counts.dropped, counts.in_batch) == (1, 1, 3)
    assert str(counts).startswith(f"{counts.taken} prompts taken = 3 in batch + 1 dropped + 1 failed + ")
    numbers = [int(word) for word in str(counts).replace("=", "+").split() if word.isdigit()]
    assert numbers[0] == sum(numbers[1:])


async def test_every_settled_group_is_reported_once() -> None:
    """3.2 ``on_group`` is called once with each kept, dropped and failed group and all its samples."""
    scene = attrs.evolve(PLAIN, trouble=0.2, rejects=0.2, batches=4)
    world, _, batches = await play(scene)
    settled = world.settled
    assert len({group.group_index for group in settled}) == len(settled)
    assert {group.outcome for group in settled} == set(OUTCOMES)
    for group in settled:
        if group.outcome == "kept":
            assert group.reason == ""
            assert group.rewards == [sample.reward for sample in group.samples]
        else:
            assert group.reason
    assert sum(group.outcome == "kept" for group in settled) >= len(batches) * scene.batch_size


async def test_a_filter_that_accepts_nothing_ends_the_batch() -> None:
    """3.3 After ``patience`` groups, with its name (the original looped for ever)."""
    manager = manager_of(answer_at_once, filter_fn=lambda samples: False, patience=7)
    with pytest.raises(FilterFailure, match="accepted none of the last"):
        await manager.generate_batch()
    assert 7 <= manager.accounting.dropped <= 7 + manager.config.max_inflight_groups
    manager.accounting.check()


@pytest.mark.parametrize("patience", [2, 5])
async def test_an_accepted_group_ends_the_row_of_rejected_ones(patience: int) -> None:
    """3.3.1 ``patience`` groups in a row: a run whose filter rejects fewer before each that it accepts never ends."""

    def last_of_a_row(samples: Sequence[Sample]) -> bool:
        assert samples[0].group_index is not None
        return samples[0].group_index % patience == patience - 1

    one_at_a_time = {"batch_size": 1, "over_sampling_factor": 1, "patience": patience}
    manager = manager_of(answer_at_once, filter_fn=last_of_a_row, **one_at_a_time)
    for _ in range(6):
        await manager.generate_batch()
    assert manager.accounting.dropped == 6 * (patience - 1)


async def test_patience_ends_with_the_last_group_of_the_row() -> None:
    """3.3.2 With one group at a time, exactly ``patience`` groups are rejected, also after accepted ones."""
    sizes = {"batch_size": 1, "over_sampling_factor": 1, "patience": 3}
    manager = manager_of(answer_at_once, filter_fn=lambda samples: samples[0].group_index == 2, **sizes)
    await manager.generate_batch()
    with pytest.raises(FilterFailure, match="accepted none of the last 3 groups"):
        await manager.generate_batch()
    assert manager.accounting.dropped == 2 + 3
    with pytest.raises(FilterFailure, match="accepted none of the last 3 groups"):
        await manager.generate_batch()
    assert manager.accounting.dropped == 2 + 3 + 3


async def test_the_rewards_of_earlier_rows_are_not_reported() -> None:
    """3.3.3 Groups rejected before the last accepted one do not belong to the row that ends the run."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        return [sample_for(request, reward=0.25 if request.group_index == 0 else 0.5)]

    sizes = {"batch_size": 1, "over_sampling_factor": 1, "patience": 3}
    manager = manager_of(generate, filter_fn=lambda samples: samples[0].group_index == 1, **sizes)
    await manager.generate_batch()
    with pytest.raises(FilterFailure, match=r"every reward was 0\.5, so there is nothing to learn"):
        await manager.generate_batch()


async def test_causes_are_reset_after_they_were_reported() -> None:
    """3.4 A run that continues after an error does not report old failures as new."""
    broken = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if broken:
            raise OSError("the disk is full")
        return await answer_at_once(prompts)

    manager = manager_of(generate, filter_fn=lambda samples: False, patience=5, over_sampling_factor=1)
    with pytest.raises(GenerateFailure, match="the disk is full"):
        await manager.generate_batch()
    broken = False
    with pytest.raises(FilterFailure, match="accepted none of the last"):
        await manager.generate_batch()


async def test_metrics_compare_kept_with_started_lengths() -> None:
    """3.5 The metrics of a batch show the bias of the filter in lengths."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        assert request.group_index is not None
        return [sample_for(request, length=10 if request.group_index % 2 else 2, reward=1.0)]

    manager = manager_of(generate, filter_fn=lambda samples: samples[0].response_length < 5)
    await manager.generate_batch()
    assert manager.metrics["sampled_tokens/kept"] == 2
    assert manager.metrics["sampled_tokens/dropped"] == 10
    assert 2 < manager.metrics["sampled_tokens/all"] < 10
    assert manager.metrics["prompts/in_batch"] == 3
