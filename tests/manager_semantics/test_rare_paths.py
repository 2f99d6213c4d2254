"""The law book of the group scheduler, section 13: what happens between two steps, and errors outside of rollouts.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import attrs
import pytest

from rollouts.concurrency.deadlines import paused_deadlines
from rollouts.errors import EndpointAway, RolloutsError, TokenMismatchError
from rollouts.training import AsyncRolloutManager, DataBuffer, Group, Prompt, Sample
from rollouts.training.samplers import PassRateSampler
from tests.manager_semantics.test_admission import on_virtual_clock
from tests.manager_semantics.world import answer_at_once, manager_of, never, questions

GenerateFn = Callable[[Sequence[Prompt]], Any]


class Torn(DataBuffer):
    """A data source that raises after some prompts."""

    left = 100

    def get_prompts(self, count: int) -> list[Prompt]:
        if self.left <= 0:
            raise OSError("the data are gone")
        self.left -= 1
        return super().get_prompts(count)


async def _until_it_raises(function: Callable[[], Any]) -> None:
    while True:
        await function()


@pytest.mark.parametrize(("when", "left"), [("after a batch", 4), ("after a group", 5), ("at an announcement", 100)])
async def test_an_error_of_the_data_source_ends_the_next_batch(when: str, left: int) -> None:
    """13.1 Not the batch that is complete, not the task group of all rollouts, and not the trainer's announcement."""

    async def keeps(samples: Sequence[Sample]) -> bool:
        return when != "after a group" or samples[0].group_index in (0, 1)

    buffer = Torn(questions(50))
    manager = manager_of(answer_at_once, buffer, batch_size=2, over_sampling_factor=2, filter_fn=keeps)
    bound = 1 if when == "at an announcement" else None
    async with manager, aclosing(manager.stream(max_staleness=bound, policy="pace")) as batches:
        manager.announce_version("0")
        buffer.left = left
        assert {sample.group_index for sample in await anext(batches)} == {0, 1}
        if when == "at an announcement":
            buffer.left = 0
            manager.announce_version("1")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(OSError, match="the data are gone"), anyio.fail_after(20):
            await _until_it_raises(batches.__anext__)
    manager.accounting.check()


def slow_to_close(first: Exception, seconds: float = 20.0) -> GenerateFn:
    """In group 0, one rollout raises, and the other ones clean up slowly; other groups answer after a second."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        if request.index == 0:
            raise first
        if request.group_index == 0:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(seconds)
        await anyio.sleep(1)
        return await answer_at_once(prompts)

    return generate


def test_an_outage_that_ends_one_call_does_not_end_the_next() -> None:
    """13.2 Each group meets it at its own time, some as the first call is closing."""

    async def run() -> None:
        away = True

        async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
            (request,) = prompts
            if away and request.group_index == 1 and request.index == 3:
                try:
                    await anyio.sleep_forever()
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(20)
            if away:
                await anyio.sleep(2 - request.group_index)
                raise EndpointAway("no server answers")
            return await answer_at_once(prompts)

        manager = manager_of(generate, batch_size=2, n_samples_per_prompt=2, over_sampling_factor=1)
        with pytest.raises(EndpointAway):
            await manager.generate_batch()
        away = False
        assert {sample.group_index for sample in await manager.generate_batch()} == {0, 1}

    on_virtual_clock(run)


@pytest.mark.parametrize("end", ["group_seconds", "put_back", "close"])
def test_a_broken_law_outlives_the_end_of_its_group(end: str) -> None:
    """13.2 Its siblings are still cleaning up when the group is cancelled: the run stops nevertheless."""

    async def run() -> None:
        generate = slow_to_close(TokenMismatchError("a broken law"))
        options: dict[str, Any] = {"group_seconds": 5.0} if end == "group_seconds" else {}
        manager = manager_of(generate, batch_size=1, over_sampling_factor=3, **options)
        async with contextlib.nullcontext() if end == "close" else manager:
            if end == "put_back":
                await manager.generate_batch()
                await manager.put_back({0})
            with pytest.raises(TokenMismatchError, match="a broken law"):
                await _until_it_raises(manager.generate_batch)

    on_virtual_clock(run)


def test_the_deadline_of_a_group_does_not_replace_a_failure() -> None:
    """13.3 A rollout that failed before the deadline keeps its cause, and counts once."""
    settled: list[Group] = []

    async def note(group: Group) -> None:
        settled.append(group)

    async def run() -> None:
        generate = slow_to_close(ValueError("the cause"))
        manager = manager_of(generate, batch_size=1, group_seconds=5.0, max_attempts=1)
        manager = AsyncRolloutManager(manager.config, manager.data_buffer, on_group=note)  # type: ignore[arg-type]
        async with manager:
            await manager.generate_batch()
            await anyio.sleep(60)
            assert manager.failures.lost == {"generate": 1, "deadline": 1}

    on_virtual_clock(run)
    (failed,) = [group for group in settled if group.outcome == "failed"]
    assert "the cause" in failed.reason


async def test_a_group_that_was_just_started_can_be_put_back() -> None:
    """13.4 Before the first step of its task."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        return await (answer_at_once if prompts[0].group_index in (0, 1) else never)(prompts)

    manager = manager_of(generate, batch_size=2, over_sampling_factor=2)
    async with manager, aclosing(manager.stream()) as batches:
        await anext(batches)
        started = manager.accounting.taken
        out = manager.accounting.in_flight
        assert out
        with anyio.fail_after(20):
            await manager.put_back(set(range(started)))
        assert (manager.accounting.in_flight, manager.accounting.returned) == (0, out)


def test_a_batch_that_was_filled_in_time_is_returned() -> None:
    """13.5 ``batch_seconds`` does not count the end of the groups in flight, which may clean up slowly."""

    async def run() -> int:
        async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
            if prompts[0].group_index:
                return await slow_to_close(ValueError())([attrs.evolve(prompts[0], group_index=0)])  # type: ignore[no-any-return]
            await anyio.sleep(5)
            return await answer_at_once(prompts)

        manager = manager_of(generate, batch_size=1, over_sampling_factor=2, batch_seconds=10.0)
        return len(await manager.generate_batch())

    assert on_virtual_clock(run) == 2


def test_a_group_does_not_pause_the_deadline_of_the_group_whose_slot_it_took() -> None:
    """13.6 It starts at the end of a rollout of the other group, and not among the deadlines of that rollout."""

    async def run() -> None:
        async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
            if prompts[0].index == 1:
                await anyio.sleep_forever()
            if prompts[0].group_index:
                with paused_deadlines():
                    await anyio.sleep(1000)
            return await answer_at_once(prompts)

        manager = manager_of(generate, batch_size=1, in_flight=2, group_seconds=15.0, rollout_seconds=1e7)
        async with manager, anyio.create_task_group() as tasks:
            tasks.start_soon(manager.generate_batch)
            await anyio.sleep(100)
            assert manager.accounting.failed == 1
            tasks.cancel_scope.cancel()

    on_virtual_clock(run)


class Log:
    """A log that has no room for the first batch."""

    batches = 0

    def taken(self, *fields: Any) -> None: ...
    def attempt_lost(self, *fields: Any) -> None: ...
    async def finished(self, samples: Any) -> None: ...
    def turn_log(self, index: int) -> Any: ...

    async def settled(self, group: Group, appended: Callable[[], None]) -> None:
        appended()

    def sealed(self, *fields: Any) -> None:
        self.batches += 1
        if self.batches == 1:
            raise OSError("no space left on device")


class Unmeasured(PassRateSampler):
    """Its numbers fail once."""

    asked = 0

    def metrics(self) -> dict[str, float]:
        self.asked += 1
        if self.asked == 1:
            raise OSError("no numbers yet")
        return {}


@pytest.mark.parametrize("source", ["the log", "the sampler"])
async def test_a_batch_that_cannot_be_recorded_is_not_lost(source: str) -> None:
    """13.7 Its groups stay ready, and are the next batch."""
    buffer = DataBuffer(questions(50), sampler=Unmeasured() if source == "the sampler" else None)
    config = manager_of(answer_at_once).config
    manager = AsyncRolloutManager(config, buffer, rollout_log=Log() if source == "the log" else None)
    async with manager:
        with pytest.raises((OSError, RolloutsError), match="no ") as raised:
            await manager.generate_batch()
        assert ("Unmeasured.metrics raised OSError" in str(raised.value)) == (source == "the sampler")
        assert (manager.accounting.in_batch, manager.batches) == (0, 0)
        ready = [group.group_index for group in manager.ready_groups][:3]
        batch = await manager.generate_batch()
        assert sorted({sample.group_index for sample in batch}) == ready
        assert (manager.accounting.in_batch, manager.batches) == (3, 1)
