"""How late the loop is."""

from __future__ import annotations

import time

import anyio

from rollouts.observability import LoopLag


async def test_a_loop_that_is_blocked_is_late_by_as_much() -> None:
    """A blocking call is measured at the next wake-up."""
    lag = LoopLag(interval=0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lag.run)
        await anyio.wait_all_tasks_blocked()
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        while not lag.longest:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert lag.longest >= 0.04


def test_quantiles_are_of_the_last_and_the_longest_of_all() -> None:
    """The longest lag covers all wake-ups, the quantiles only the latest."""
    lag = LoopLag(kept=100)
    assert lag.quantile(0.99) == 0.0
    lag.add(5.0)
    for number in range(100):
        lag.add(number / 1000)
    assert (lag.quantile(0.5), lag.quantile(0.99), lag.longest) == (0.05, 0.099, 5.0)
