"""What a filter may answer, and groups that leave the manager by another way than a batch; the laws have their own book."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from anyio.lowlevel import checkpoint

from rollouts.errors import FilterFailure
from rollouts.training import AsyncRolloutManager, DataBuffer, Group, Prompt, RolloutConfig, Sample, Status


@attrs.frozen
class Answer:
    """As trainers write them."""

    keep: Any
    reason: str | None = None
    keep_when_insufficient: bool = False


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    await checkpoint()
    (prompt,) = prompts
    assert prompt.index is not None
    return [Sample(tokens=[1, 2], status=Status.COMPLETED, reward=float(prompt.index % 2))]


def config(**options: Any) -> RolloutConfig:
    return RolloutConfig(**{"batch_size": 2, "n_samples_per_prompt": 2, "generate_fn": generate, **options})


async def test_a_filter_may_give_its_reason() -> None:
    """An object with ``keep`` is an answer; its reason is what is counted."""

    def check(samples: Sequence[Sample]) -> Any:
        dull = samples[0].group_index in (0, 2)
        return Answer(keep=not dull, reason="dull" if dull else None)

    settled: list[Group] = []
    manager = AsyncRolloutManager(config(filter_fn=check), DataBuffer(["a", "b"]), on_group=settled.append)
    batch = await manager.generate_batch()
    assert {sample.group_index for sample in batch} == {1, 3}
    assert {group.reason for group in settled if group.outcome == "dropped"} == {"dull"}


async def test_what_is_no_answer_is_a_failure() -> None:
    """Whatever it is wrapped in."""
    manager = AsyncRolloutManager(config(filter_fn=lambda samples: Answer(keep="yes"), patience=1), DataBuffer(["a"]))
    with pytest.raises(Exception, match="expected True or False") as raised:
        await manager.generate_batch()
    assert FilterFailure.__name__ in str(raised.value) or isinstance(raised.value, FilterFailure)


async def test_a_group_that_the_batch_needs_is_kept() -> None:
    """``keep_when_insufficient``: only where the batch could not be filled without it."""

    def check(samples: Sequence[Sample]) -> Any:
        return Answer(keep=False, keep_when_insufficient=True)

    manager = AsyncRolloutManager(config(filter_fn=check, over_sampling_factor=1.0), DataBuffer(["a", "b"]))
    assert len(await manager.generate_batch()) == 4
    assert manager.accounting.dropped == 0
    wide = AsyncRolloutManager(config(filter_fn=check, over_sampling_factor=2.0), DataBuffer(["a", "b"]))
    assert len(await wide.generate_batch()) == 4
    assert wide.accounting.dropped >= 1


async def test_withdrawn_groups_are_counted() -> None:
    """They leave as dropped, with their samples, and the sum still adds up."""
    manager = AsyncRolloutManager(config(over_sampling_factor=3.0), DataBuffer(["a", "b"]))
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


async def test_rollouts_that_were_finished_elsewhere_are_taken_over() -> None:
    """A group goes on with those that are missing."""
    played: list[int | None] = []

    async def noted(prompts: Sequence[Prompt]) -> list[Sample]:
        played.append(prompts[0].index)
        return await generate(prompts)

    manager = AsyncRolloutManager(config(generate_fn=noted, over_sampling_factor=1.0), DataBuffer(["a", "b"]))
    done = Sample(tokens=[7, 8], status=Status.COMPLETED, reward=5.0, group_index=0, index=1, rollout_id=1)
    manager.adopt(0, {1: [done]})
    assert manager.finished_rollouts(0) == {1: [done]}
    batch = await manager.generate_batch()
    assert sorted(index for index in played if index is not None) == [0, 2, 3]
    assert batch[1].tokens == [7, 8]
