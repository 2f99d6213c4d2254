"""Admission of rollouts to slots: order, cancellation, reservation and metrics."""

from __future__ import annotations

import random

import anyio
import pytest

from rollouts.concurrency.boundary import waits
from rollouts.concurrency.deadlines import deadline
from rollouts.planning.simulation import VirtualLoop
from rollouts.training.slots import Slots
from tests.manager_semantics.world import points


class Rollouts:
    """Rollouts of one open group a number, each in a task with its cancel scope."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.begun: list[tuple[int, int]] = []
        self.scopes: dict[tuple[int, int], anyio.CancelScope] = {}
        self.ends: dict[tuple[int, int], anyio.Event] = {}

    async def run(self, group: int, number: int) -> None:
        key = group, number
        self.ends[key] = anyio.Event()
        with anyio.CancelScope() as self.scopes[key]:
            await self.slots.acquire(group, number, deadline(None))
            try:
                self.begun.append(key)
                await self.ends[key].wait()
            finally:
                self.slots.release()

    def end_all(self) -> None:
        for event in self.ends.values():
            event.set()


async def test_a_free_slot_goes_to_the_oldest_group() -> None:
    """In whatever order rollouts ask; within a group, to the lowest number."""
    slots = Slots(1)
    rollouts = Rollouts(slots)
    keys = [(group, number) for group in range(4) for number in range(3)]
    random.Random(1).shuffle(keys)
    for group in range(5):
        slots.open(group, 3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rollouts.run, 4, 0)
        await points(2)
        for key in keys:
            tasks.start_soon(rollouts.run, *key)
        await points(2)
        assert slots.waiting == len(keys)
        for _ in range(len(keys) + 1):
            rollouts.ends[rollouts.begun[-1]].set()
            await points(3)
    assert rollouts.begun == [(4, 0), *sorted(keys)]


async def test_a_cancelled_rollout_hands_its_slot_on() -> None:
    """A rollout that waits leaves the queue; if it was given a slot meanwhile, the next one gets it."""
    slots = Slots(1)
    rollouts = Rollouts(slots)
    slots.open(0, 4)
    async with anyio.create_task_group() as tasks:
        await slots.acquire(0, 0, deadline(None))
        for number in (1, 2, 3):
            tasks.start_soon(rollouts.run, 0, number)
        await points(2)
        rollouts.scopes[0, 1].cancel()
        await points(2)
        assert slots.waiting == 2
        rollouts.scopes[0, 2].cancel()
        slots.release()  # to rollout 2, which does not know yet that it is cancelled
        await points(3)
        assert rollouts.begun == [(0, 3)]
        rollouts.end_all()
    assert slots.running == slots.waiting == 0
    slots.close(0)
    assert slots.has_room()


async def test_a_free_slot_is_announced_once_and_only_if_one_was_refused() -> None:
    """``on_free`` is called when a new group has room again, not at the end of each rollout."""
    calls: list[str] = []
    slots = Slots(2, lambda: calls.append("free"))
    rollouts = Rollouts(slots)
    slots.open(0, 2)
    assert not slots.has_room(), "both slots are reserved"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rollouts.run, 0, 0)
        tasks.start_soon(rollouts.run, 0, 1)
        await points(2)
        rollouts.ends[0, 0].set()
        await points(2)
        assert calls == ["free"]
        rollouts.ends[0, 1].set()
    slots.close(0)
    assert calls == ["free"]
    slots.open(1, 2)
    assert not slots.has_room()
    slots.close(1)  # it was cancelled before its rollouts asked
    assert calls == ["free", "free"]


async def test_a_wait_for_a_slot_is_listed() -> None:
    """With its place in the run and its kind, so that a display can name it."""
    slots = Slots(1)
    rollouts = Rollouts(slots)
    slots.open(0, 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rollouts.run, 0, 0)
        tasks.start_soon(rollouts.run, 0, 1)
        await points(2)
        (wait,) = waits()
        assert (wait.what, wait.shown, wait.kind) == ("a free slot of 1", "a slot", "a_pause")
        assert repr(slots) == "<Slots: 1 of 1 taken, 1 rollouts wait>"
        rollouts.end_all()
    assert not waits()


def test_the_metrics_are_means_over_time() -> None:
    """Rollouts that run, their share of the slots, and open groups; since the last call."""

    async def run() -> None:
        slots = Slots(4)
        slots.take_metrics(1.0)
        slots.open(0, 2)
        await slots.acquire(0, 0, deadline(None))
        await slots.acquire(0, 1, deadline(None))
        await anyio.sleep(3)
        slots.release()
        await anyio.sleep(1)
        assert slots.take_metrics(4) == pytest.approx({"slots/running": 1.75, "slots/busy": 0.4375, "groups/open": 1})
        slots.release()
        slots.close(0)
        await anyio.sleep(1)
        assert slots.take_metrics(4) == {"slots/running": 0, "slots/busy": 0, "groups/open": 0}

    anyio.run(run, backend_options={"loop_factory": VirtualLoop})
