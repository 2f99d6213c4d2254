"""The law book of the group scheduler, section 12: with ``in_flight``, rollouts are admitted one by one.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import attrs
import pytest
from hypothesis import HealthCheck, given, settings

from rollouts.concurrency.boundary import waits
from rollouts.errors import ConfigError, DataExhausted, FilterFailure, GenerateFailure
from rollouts.planning.simulation import VirtualLoop
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    Group,
    Prompt,
    RolloutConfig,
    Sample,
)
from rollouts.training.failures import FailurePolicy
from tests.manager_semantics.world import (
    PLAIN,
    Scene,
    Till,
    World,
    answer_at_once,
    check_batch,
    manager_of,
    play,
    points,
    questions,
    sample_for,
    scenes,
)


@pytest.fixture(scope="session")
def examples(request: pytest.FixtureRequest) -> int:
    return 2_000 if request.config.getoption("--long") else 80


def on_virtual_clock(function: Callable[[], Any]) -> Any:
    return anyio.run(function, backend_options={"loop_factory": VirtualLoop})


def after(seconds: Callable[[Prompt], float]) -> Callable[[Sequence[Prompt]], Any]:
    """A generate function whose rollouts take the given seconds."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.sleep(seconds(prompts[0]))
        return await answer_at_once(prompts)

    return generate


def lognormal(prompt: Prompt) -> float:
    return random.Random(f"{prompt.group_index}/{prompt.index}").lognormvariate(3.0, 1.0)


@attrs.define
class Journalled:
    """The events of a run in order, with the times of a virtual clock."""

    events: list[tuple[Any, ...]] = attrs.field(factory=list)

    def note(self, *what: Any) -> None:
        self.events.append((round(anyio.current_time(), 6), *what))


def schedule(**options: Any) -> list[tuple[Any, ...]]:
    """The events of six batches with failures, retries, drops and lognormal lengths."""
    log = Journalled()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        log.note("begins", prompt.index, prompt.replacement)
        await anyio.sleep(lognormal(prompt))
        log.note("ends", prompt.index)
        if random.Random(f"{prompt.index}/{len(log.events)}").random() < 0.1:
            raise ValueError("lost")
        return [sample_for(prompt, reward=1.0)]

    async def passes(samples: Sequence[Sample]) -> bool:
        return samples[0].group_index is not None and samples[0].group_index % 5 != 1

    async def on_group(group: Group) -> None:
        log.note("settled", group.group_index, group.outcome)

    async def run() -> None:
        config = RolloutConfig(
            **{"batch_size": 4, "n_samples_per_prompt": 3, "generate_fn": generate, "filter_fn": passes, **options}
        )
        async with AsyncRolloutManager(config, DataBuffer(questions(500)), on_group=on_group) as manager:
            for number in range(6):
                samples = await manager.generate_batch()
                log.note("batch", number, [sample.index for sample in samples])
                await anyio.sleep(5)

    on_virtual_clock(run)
    return log.events


@pytest.mark.parametrize("factor", [1, 1.5, 3])
@pytest.mark.parametrize("replacements", [0, 1])
def test_slots_for_all_change_nothing(factor: float, replacements: int) -> None:
    """12.1 With as many slots as rollouts in flight, the schedule is the one without a limit, event by event."""
    failures = {"generate": FailurePolicy(replacements=replacements)}
    unlimited = schedule(over_sampling_factor=factor, failures=failures)
    most = RolloutConfig(
        batch_size=4, n_samples_per_prompt=3, over_sampling_factor=factor, generate_fn=answer_at_once
    ).max_inflight_rollouts
    assert schedule(over_sampling_factor=factor, failures=failures, in_flight=most) == unlimited
    assert schedule(over_sampling_factor=factor, failures=failures, in_flight=most - 1) != unlimited


def test_the_schedule_with_slots_is_deterministic() -> None:
    """12.2 The same run has the same events again, whatever waits for a slot."""
    assert schedule(over_sampling_factor=3, in_flight=5) == schedule(over_sampling_factor=3, in_flight=5)


def test_every_law_holds_with_any_number_of_slots(examples: int) -> None:
    """12.3 With retries, replacements, cancellations and closes, at most ``in_flight`` rollouts run; all slots are free
    at the end; groups are whole, sums add up, nothing is lost."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(scene=scenes(threads=False), in_flight=..., replacements=...)
    def one(scene: Scene, in_flight: int, replacements: int) -> None:
        anyio.run(play, attrs.evolve(scene, in_flight=in_flight % 9 + 1, replacements=replacements % 3))

    one()


def test_a_run_continues_with_another_number_of_slots(examples: int) -> None:
    """12.4 A state that was saved with one ``in_flight`` continues with another: each group is in one batch, and no
    finished rollout is generated again."""

    async def one_scene(scene: Scene, first: int, then: int, cut: int) -> None:
        world = World(scene)
        batches: list[list[Sample]] = []
        till = Till(questions(scene.prompts), seed=scene.seed, epochs=1)
        manager = world.manager = AsyncRolloutManager(world.config(in_flight=first), till)
        with anyio.CancelScope() as scope:
            async with manager, anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_after, scope, cut)
                await _take_batches(manager, batches)
                tasks.cancel_scope.cancel()
        assert manager.slots.running == manager.slots.waiting == 0
        other = Till(questions(scene.prompts), seed=scene.seed, epochs=1)
        resumed = world.manager = AsyncRolloutManager(world.config(in_flight=then), other)
        resumed.load_state_dict(manager.state_dict())
        async with resumed:
            await _take_batches(resumed, batches)
        assert not world.violations, world.violations
        texts = {**till.texts, **other.texts}
        in_batches = [group for batch in batches for group in check_batch(batch, resumed.config, texts)]
        places = in_batches + [group.group_index for group in resumed.ready_groups]
        assert sorted(places) == list(range(scene.prompts)), "no trouble: every group is kept, in one place"
        assert resumed.slots.running == resumed.slots.waiting == 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(scene=scenes(trouble=0, flaky=0, rejects=0, threads=False), first=..., then=..., cut=...)
    def one(scene: Scene, first: int, then: int, cut: int) -> None:
        anyio.run(one_scene, scene, first % 9 + 1, then % 9 + 1, cut % (4 * scene.longest + 30))

    one()


async def _cancel_after(scope: anyio.CancelScope, count: int) -> None:
    await points(count)
    scope.cancel()


async def _take_batches(manager: AsyncRolloutManager, batches: list[list[Sample]]) -> None:
    try:
        while True:
            batches.append(await manager.generate_batch())
    except DataExhausted:
        return


async def test_the_oldest_open_group_comes_first() -> None:
    """12.5 A free slot goes to the waiting rollout of the oldest group; a new group starts when none waits."""
    begun: list[int | None] = []

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        begun.append(prompts[0].index)
        await points(random.Random(f"{prompts[0].index}").randrange(9))
        return await answer_at_once(prompts)

    async with manager_of(generate, in_flight=3, over_sampling_factor=4, n_samples_per_prompt=5) as manager:
        for _ in range(4):
            await manager.generate_batch()
    assert begun == sorted(begun, key=lambda index: index or 0)


async def test_a_free_slot_starts_one_group() -> None:
    """12.6 Prompts are taken when a slot is free, and the rollouts of a started group are counted before they run."""
    release = anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await release.wait()
        return await answer_at_once(prompts)

    manager = manager_of(generate, in_flight=5, over_sampling_factor=10)
    async with manager, anyio.create_task_group() as tasks:
        tasks.start_soon(manager.generate_batch)
        await points(100)
        assert manager.accounting.taken == 3, "two groups of two, and a third that waits for its second slot"
        assert manager.slots.running == 5
        assert [str(wait.what) for wait in waits() if wait.kind == "a_pause"] == ["a free slot of 5"]
        release.set()


async def test_a_group_that_is_filtered_reserves_no_slot() -> None:
    """12.6 Its rollouts have ended, so that another group may start meanwhile."""
    free: list[bool] = []

    def keep(samples: list[Sample]) -> bool:
        free.append(manager.slots.has_room())
        return True

    manager = manager_of(answer_at_once, in_flight=1, batch_size=1, over_sampling_factor=1, filter_fn=keep)
    await manager.generate_batch()
    assert free == [True]


def test_the_deadline_of_a_group_does_not_count_waits_for_a_slot() -> None:
    """12.7 A group that waits ten times ``group_seconds`` for its slots does not fail. ``batch_seconds`` counts it."""

    async def run(**options: Any) -> int:
        generate = after(lambda prompt: 0.9)
        manager = manager_of(generate, in_flight=1, n_samples_per_prompt=12, group_seconds=1.0, **options)
        async with manager:
            await manager.generate_batch()
        assert manager.accounting.failed == 0
        return manager.accounting.in_batch

    assert on_virtual_clock(run) == 3
    with pytest.raises(GenerateFailure, match="0 of 3 groups were accepted within 5 s"):
        on_virtual_clock(functools.partial(run, batch_seconds=5.0))


def test_a_group_that_hangs_in_its_slots_fails_in_time() -> None:
    """12.8 ``group_seconds`` counts while no rollout of the group waits, also after a wait; its slots are then free."""

    async def run() -> float:
        generate = after(lambda prompt: 1e6 if prompt.index in (2, 3) else 10.0)
        manager = manager_of(generate, in_flight=2, n_samples_per_prompt=4, group_seconds=15.0, rollout_seconds=1e7)
        async with manager:
            await manager.generate_batch()
            assert manager.failures.lost["deadline"] == 2
            assert manager.accounting.failed == 1
        return anyio.current_time()

    assert on_virtual_clock(run) == pytest.approx(10 + 15 + 3 * 20, abs=1)


async def test_a_group_that_was_put_back_leaves_the_queue() -> None:
    """12.9 A cancelled group frees its slots for the others, and its waiting rollouts take none."""
    release = anyio.Event()
    begun: list[int | None] = []

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        begun.append(prompts[0].group_index)
        await release.wait()
        return await answer_at_once(prompts)

    manager = manager_of(generate, in_flight=3, n_samples_per_prompt=4, over_sampling_factor=1, batch_size=2)
    async with manager, anyio.create_task_group() as tasks:
        tasks.start_soon(manager.generate_batch)
        await points(50)
        assert begun == [0, 0, 0]
        await manager.put_back({0})
        await points(50)
        assert manager.slots.running == 3
        assert manager.slots.waiting == 1
        assert begun == [0, 0, 0, 1, 1, 1]
        release.set()
    manager.accounting.check()


async def test_an_error_of_the_data_source_is_not_the_error_of_the_rollout_that_ended() -> None:
    """12.10 The batch ends with it; the rollout whose slot was free is kept, and its group is ready or returned."""

    class Torn(DataBuffer):
        def get_prompts(self, count: int) -> list[Prompt]:
            if self.begun >= 4:
                raise OSError("the data are gone")
            self.begun += 1
            return super().get_prompts(count)

        begun = 0

    manager = manager_of(after(lambda prompt: 0), Torn(questions(50)), in_flight=2, over_sampling_factor=9)
    manager = AsyncRolloutManager(attrs.evolve(manager.config, batch_size=9), manager.data_buffer)
    async with manager:
        with pytest.raises(OSError, match="the data are gone"):
            await manager.generate_batch()
        assert manager.accounting.failed == 0
        assert not manager.failures.lost
    assert manager.accounting.ready + manager.accounting.returned == 4


async def test_no_prompt_is_taken_between_batches() -> None:
    """12.11 Rollouts that end while no batch is being filled start no group; in a stream they do."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await points(prompts[0].index or 0)
        return await answer_at_once(prompts)

    async with manager_of(generate, in_flight=4, over_sampling_factor=9) as manager:
        await manager.generate_batch()
        taken = manager.accounting.taken
        await points(200)
        assert manager.accounting.taken == taken
        stream = manager.stream()
        await anext(stream)
        taken = manager.accounting.taken
        await points(200)
        assert manager.accounting.taken > taken
        await stream.aclose()


async def test_patience_is_not_spent_by_free_slots() -> None:
    """12.12 After ``patience`` rejected groups, the end of a rollout starts no further group."""

    async def drop(samples: Sequence[Sample]) -> bool:
        return False

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await points(prompts[0].index or 0)
        return await answer_at_once(prompts)

    manager = manager_of(generate, filter_fn=drop, in_flight=3, over_sampling_factor=9, patience=5)
    async with manager:
        with pytest.raises(FilterFailure, match=r"none of the last [5-7] groups"):
            await manager.generate_batch()
        taken = manager.accounting.taken
        await points(200)
        assert manager.accounting.taken == taken <= 9


@pytest.mark.parametrize(("in_flight", "dropped"), [(None, 15), (12, 3), (4, 0), (100, 15)])
async def test_scarce_groups_are_kept_by_the_groups_that_can_run(in_flight: int | None, dropped: int) -> None:
    """12.13 ``keep_when_insufficient`` waits for the drops of groups that run beyond a batch, whatever the factor."""

    @attrs.frozen
    class Answer:
        keep: bool = False
        keep_when_insufficient: bool = True

    async def drop(samples: Sequence[Sample]) -> Any:
        return Answer()

    manager = manager_of(answer_at_once, filter_fn=drop, in_flight=in_flight, over_sampling_factor=6, patience=100)
    async with manager:
        await manager.generate_batch()
    assert manager.accounting.dropped in (dropped, dropped + 1), "one may be judged before another is counted"


def test_a_retry_keeps_its_slot() -> None:
    """12.14 No other rollout runs in the slot of a failed one before its retry; a replacement waits for a slot.

    It goes before the rollouts of a younger group, which starts in the same turn as the slot is free: the start of a
    group yields, and here is what breaks without that.
    """
    begun: list[tuple[int | None, int]] = []

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        begun.append((prompt.index, prompt.replacement))
        await anyio.sleep(1)
        if prompt.index == 0 and not prompt.replacement:
            raise ValueError("lost")
        return await answer_at_once(prompts)

    async def run() -> None:
        failures = {"generate": FailurePolicy(attempts=2, replacements=1)}
        async with manager_of(generate, in_flight=1, failures=failures) as manager:
            await manager.generate_batch()

    on_virtual_clock(run)
    assert begun[:5] == [(0, 0), (0, 0), (1, 0), (0, 1), (2, 0)]


def test_a_rollout_that_may_run_alone_is_enough() -> None:
    """12.15 ``in_flight`` may be smaller than a group; wrong values are refused."""
    world, _, batches = anyio.run(play, attrs.evolve(PLAIN, in_flight=1))
    assert len(batches) == PLAIN.batches
    for wrong in (0, -1, 1.5, True, "4"):
        with pytest.raises(ConfigError, match=r"RolloutConfig\.in_flight"):
            world.config(in_flight=wrong)


async def test_the_wait_for_a_slot_is_in_the_times_of_the_rollout() -> None:
    """12.16 As a span before the others; a rollout that did not wait has none."""
    async with manager_of(after(lambda prompt: 0), in_flight=1) as manager:
        samples = await manager.generate_batch()
    spans = [[(span.activity, span.name) for span in sample.times] for sample in samples]
    assert spans == [[], [("queued", "a slot")]] * 3, "the second of each group of two"


def test_the_time_between_two_requests_is_no_part_of_the_means_of_a_batch() -> None:
    """12.17 Outside a stream, the means of the slots are those of the batch's own time."""

    async def run() -> list[float]:
        busy = []
        async with manager_of(after(lambda prompt: 1), in_flight=4, over_sampling_factor=1) as manager:
            for _ in range(2):
                await manager.generate_batch()
                busy.append(manager.metrics["slots/running"])
                await anyio.sleep(1000)
        return busy

    assert on_virtual_clock(run) == pytest.approx([3, 3]), "six rollouts of a second in two seconds"
