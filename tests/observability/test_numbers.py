"""The numbers of a run at this moment."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Prompt
from rollouts.errors import GenerateFailure
from rollouts.observability import numbers_of
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from tests.stored_runs import some_sample


async def test_numbers_say_where_prompts_are_and_what_is_waited_for() -> None:
    """While rollouts are at work, and afterwards."""
    begun, go = anyio.Event(), anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        with boundary(GenerateFailure, "World.step"):
            begun.set()
            await go.wait()
        return [some_sample(prompt, 0) for prompt in prompts]

    config = RolloutConfig(batch_size=2, n_samples_per_prompt=3, over_sampling_factor=1.0, generate_fn=generate)
    async with AsyncRolloutManager(config, DataBuffer(["a"])) as manager:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.generate_batch)
            await begun.wait()
            await anyio.wait_all_tasks_blocked()
            now = numbers_of(manager)
            assert (now["prompts/in_flight"], now["waits/environment"]) == (2, 6)
            assert now["waits/environment_seconds"] >= 0
            go.set()
        then = numbers_of(manager)
    assert (then["prompts/in_batch"], then["batches"], then["rollouts"]) == (2, 1, 6)
    assert "waits/environment" not in then
    assert then["batch/turns/mean"] == 2
