"""The law book of the group scheduler, section 10: call shapes.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rollouts.errors import (
    ConfigError,
)
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    Prompt,
    RolloutConfig,
    Sample,
)
from tests.manager_semantics.world import (
    answer_at_once,
    manager_of,
    sample_for,
)


async def test_the_order_of_arguments() -> None:
    """10.1 ``(config, data_buffer)``; the other order is an error that names the right one."""
    config, buffer = RolloutConfig(batch_size=2, generate_fn=answer_at_once), DataBuffer(["a"])
    with pytest.raises(ConfigError, match=r"AsyncRolloutManager.config: .*a RolloutConfig, before the data buffer"):
        AsyncRolloutManager(buffer, config)  # type: ignore[arg-type]
    assert len(await AsyncRolloutManager(config, buffer).generate_batch()) == 16


@pytest.mark.parametrize("second", [None, ["a"], "data.jsonl"])
def test_other_arguments_are_refused_by_name(second: Any) -> None:
    """10.2 An argument that is neither a buffer nor a config is refused."""
    with pytest.raises(ConfigError, match=r"AsyncRolloutManager.data_buffer: got .*; expected a DataBuffer"):
        AsyncRolloutManager(RolloutConfig(batch_size=2, generate_fn=answer_at_once), second)
    with pytest.raises(ConfigError, match=r"AsyncRolloutManager.config: got .*; expected a RolloutConfig"):
        AsyncRolloutManager(second, DataBuffer(["a"]))


async def test_functions_may_be_partials_objects_sync_or_async() -> None:
    """10.3 What can be called can be configured."""

    class Judge:
        async def __call__(self, sample: Sample) -> float:
            return 0.25

    async def generate(prompts: Sequence[Prompt], *, reward: float) -> list[Sample]:
        return [sample_for(prompt, reward=reward) for prompt in prompts]

    def lazily(sample: Sample) -> Any:
        return Judge()(sample)

    for judge, expected in [(None, 0.5), (Judge(), 0.25), (partial(Judge()), 0.25), (lazily, 0.25)]:
        manager = manager_of(partial(generate, reward=0.5), reward_fn=judge)
        assert {sample.reward for sample in await manager.generate_batch()} == {expected}


async def test_each_call_asks_for_one_rollout_with_its_place() -> None:
    """10.4 ``generate_fn`` receives a list of one prompt with group index, index, label and metadata."""
    rows = [{"prompt": f"p{number}", "label": number, "metadata": {"level": number}} for number in range(50)]
    seen: list[Prompt] = []

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        seen.extend(prompts)
        assert len(prompts) == 1
        return await answer_at_once(prompts)

    batch = await manager_of(generate, DataBuffer(rows)).generate_batch()
    for request in seen:
        assert request.group_index == (request.index or 0) // 2
        assert request.label == request.group_index
        assert request.metadata == {"level": request.group_index}
    assert [sample.label for sample in batch] == [0, 0, 1, 1, 2, 2]


async def test_the_state_of_a_manager_is_its_repr() -> None:
    """10.5 The repr of a manager contains its batches and its accounting."""
    manager = manager_of(answer_at_once, over_sampling_factor=1)
    assert repr(manager).startswith("<AsyncRolloutManager 0 batches · 0 prompts taken")
    await manager.generate_batch()
    assert (
        repr(manager)
        == "<AsyncRolloutManager 1 batches · 3 prompts taken = 3 in batch + 0 dropped + 0 failed + 0 returned>"
    )
