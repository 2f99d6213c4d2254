"""A burst of tasks passes a gate in order, a limited number in each turn of the loop."""

from __future__ import annotations

import asyncio
from collections import Counter

import anyio
import anyio.lowlevel

from rollouts.concurrency.fair_turns import FairTurns


async def _passing(gate: FairTurns, count: int, cancelled: int | None = None) -> tuple[list[int], list[int]]:
    """Let tasks pass; return their numbers in order, and the number of the turn of each."""
    order: list[int] = []
    turns: list[int] = []
    turn = 0
    loop = asyncio.get_running_loop()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if len(order) < count - (cancelled is not None):
            loop.call_soon(count_turns)

    async def task(number: int) -> None:
        with anyio.CancelScope() as scope:
            scopes[number] = scope
            await gate.passed()
            order.append(number)
            turns.append(turn)

    scopes: dict[int, anyio.CancelScope] = {}
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(task, number)
        loop.call_soon(count_turns)
        if cancelled is not None:
            await anyio.lowlevel.checkpoint()
            scopes[cancelled].cancel()
    return order, turns


async def test_a_burst_is_spread_over_turns_in_order() -> None:
    """100 tasks, at most 7 in a turn; no turn is empty until all have passed."""
    order, turns = await _passing(FairTurns(7), 100)
    assert order == list(range(100))
    assert max(Counter(turns).values()) <= 7
    assert len(set(turns)) <= 100 // 7 + 2


async def test_few_tasks_pass_at_once() -> None:
    """Below the limit no task waits."""
    order, turns = await _passing(FairTurns(32), 20)
    assert order == list(range(20))
    assert len(set(turns)) == 1


async def test_a_cancelled_task_leaves_and_the_others_pass() -> None:
    """Its place is not lost: the task behind it passes in its turn."""
    gate = FairTurns(4)
    order, _ = await _passing(gate, 30, cancelled=17)
    assert order == [number for number in range(30) if number != 17]
    assert repr(gate).startswith("<FairTurns: 0 tasks wait")
    order, _ = await _passing(gate, 30)
    assert order == list(range(30))


def test_a_gate_outlives_its_loop() -> None:
    """A loop that ended between two turns leaves no task waiting in the next loop."""
    gate = FairTurns(4)

    async def leave_others() -> None:
        for _ in range(30):
            asyncio.get_running_loop().create_task(gate.passed())
        await anyio.lowlevel.checkpoint()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_others())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.close()
    order, _ = asyncio.run(_passing(gate, 30))
    assert order == list(range(30))
