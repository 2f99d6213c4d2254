"""The law book of the group scheduler, section 9: nothing is dropped for being long.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import anyio
import anyio.to_thread

from rollouts.training import (
    DataBuffer,
    Prompt,
    Sample,
)
from tests.manager_semantics.world import (
    answer_at_once,
    manager_of,
    points,
    questions,
    sample_for,
)


async def test_a_long_group_is_in_some_later_batch() -> None:
    """9.1 A group that finishes long after its batch was full is carried into a later one, whole."""
    long = anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].index == 1:
            await long.wait()
        return await answer_at_once(prompts)

    async with manager_of(generate) as manager:
        for _ in range(3):
            batch = await manager.generate_batch()
            assert 0 not in {sample.group_index for sample in batch}
        long.set()
        await points(20)
        batch = await manager.generate_batch()
    assert [sample.index for sample in batch][:2] == [0, 1], "and before anything younger"


async def test_lengths_do_not_decide_what_is_trained() -> None:
    """9.2 Over a finite data set every group ends in a batch, whatever its length: no bias to short replies."""
    rng = random.Random(5)
    lengths = [rng.choice([1, 3, 200]) for _ in range(240)]

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        assert request.index is not None
        await points(lengths[request.index])
        return [sample_for(request, length=lengths[request.index], reward=1.0)]

    manager = manager_of(generate, DataBuffer(questions(120), epochs=1), batch_size=10)
    async with manager:
        batches = [await manager.generate_batch() for _ in range(12)]
    assert [len(sample) - 1 for batch in sorted(batches, key=lambda b: b[0].index or 0) for sample in batch].count(
        200
    ) == lengths.count(200)
    assert sorted(sample.index or 0 for batch in batches for sample in batch) == list(range(240))
    assert manager.accounting.returned == 0


async def test_without_the_context_a_long_group_is_handed_back_once() -> None:
    """9.3 The next call waits for a returned group, whatever its length."""
    begun: Counter[int] = Counter()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        assert request.group_index is not None
        begun[request.group_index] += 1
        await points(500 if request.group_index % 4 == 0 else 1)
        return await answer_at_once(prompts)

    manager = manager_of(generate, DataBuffer(questions(400)), batch_size=4)
    batches = [{sample.group_index for sample in await manager.generate_batch()} for _ in range(8)]
    handed_out = set().union(*batches)
    oldest_missing = next(group for group in range(400) if group not in handed_out)
    assert oldest_missing >= 4 * 7, "nothing older than the last batch is left out"
    assert max(begun.values()) <= 2 * manager.config.n_samples_per_prompt
