"""The law book of the group scheduler, section 8: exhausted data.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import pytest

from rollouts.errors import (
    DataExhausted,
)
from rollouts.training import (
    DataBuffer,
)
from tests.manager_semantics.world import (
    answer_at_once,
    manager_of,
    points,
    questions,
    slow_first,
)


@pytest.mark.parametrize("context", [True, False])
async def test_data_that_runs_dry_says_so_and_loses_nothing(context: bool) -> None:
    """8.1 Seven prompts in batches of three: two batches, then an error that counts what is left; one group waits."""
    manager = manager_of(answer_at_once, DataBuffer(questions(7), epochs=1))
    async with AsyncExitStack() as stack:
        if context:
            await stack.enter_async_context(manager)
        batches = [await manager.generate_batch(), await manager.generate_batch()]
        for _ in range(2):
            with pytest.raises(DataExhausted, match="1 of 3 groups are accepted and no prompt is left"):
                await manager.generate_batch()
    assert [group.group_index for group in manager.ready_groups] == [6]
    assert sorted({sample.group_index for batch in batches for sample in batch}) == list(range(6))
    assert manager.accounting.taken == 7 + manager.accounting.returned


async def test_a_buffer_smaller_than_a_batch() -> None:
    """8.2 Without a limit of epochs a small data set fills batch after batch; with one epoch it is exhausted."""
    batch = await manager_of(answer_at_once, 2, batch_size=5).generate_batch()
    assert [sample.prompt for sample in batch][::2] == ["question 0", "question 1"] * 2 + ["question 0"]
    with pytest.raises(DataExhausted, match="2 of 5"):
        await manager_of(answer_at_once, DataBuffer(questions(2), epochs=1), batch_size=5).generate_batch()


async def test_what_runs_dry_waits_for_what_is_in_flight() -> None:
    """8.3 The buffer is empty, but the last group is still in flight: the batch waits for it."""
    batch = await manager_of(slow_first, DataBuffer(questions(3), epochs=1)).generate_batch()
    assert len(batch) == 6


async def test_a_checkpoint_between_batches_loses_no_prompt() -> None:
    """8.4 Saved after a batch, a buffer gives out again whatever is in no batch, dropped or failed: also what is ready.

    Otherwise every restart skips prompts (NeMo-RL lost a third of the data that way, the long rollouts first).
    """
    buffer = DataBuffer(questions(12), epochs=1)
    async with manager_of(answer_at_once, buffer, over_sampling_factor=3) as manager:
        first = await manager.generate_batch()
        await points(200)
        state = buffer.save_state()
    again = DataBuffer(questions(12), epochs=1)
    again.load_state(state)
    async with manager_of(answer_at_once, again) as manager:
        rest = [await manager.generate_batch() for _ in range(3)]
    texts = [sample.prompt for batch in [first, *rest] for sample in batch]
    assert Counter(texts) == dict.fromkeys(questions(12), 2)
