"""Paused deadlines: none expires meanwhile, and afterwards each has as much time left as before."""

from __future__ import annotations

import math

import anyio

from rollouts.concurrency.deadlines import Clocks, deadline, listed_pause, paused_deadlines, pauses
from rollouts.concurrency.wait_report import report


async def some_time(seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await anyio.sleep_forever()


def _ends(limit: deadline) -> float:
    """The time at which the scope of a deadline expires."""
    assert limit.scope is not None
    return limit.scope.deadline


async def test_a_task_may_pause_the_deadlines_of_another() -> None:
    """All deadlines of that task are paused, the outer ones too, and no others."""
    answered = anyio.Event()
    clocks: list[Clocks] = []
    late: list[bool] = []

    async def wait() -> None:
        with deadline(0.1) as outer, deadline(0.05) as inner:
            clocks.append(Clocks())
            await answered.wait()
        late.extend([outer.expired, inner.expired])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        clocks[0].pause()
        with deadline(0.05) as ours:
            await some_time(0.2)
        assert ours.caught
        answered.set()
    assert late == [False, False]


async def test_a_resumed_deadline_has_the_time_that_was_left() -> None:
    """It expires after that time."""
    with deadline(0.2) as limit:
        with paused_deadlines():
            assert _ends(limit) == math.inf
        assert 0 < _ends(limit) - anyio.current_time() <= 0.2
        await anyio.sleep_forever()
    assert limit.caught


async def test_an_expired_deadline_stays_expired() -> None:
    """A later pause does not revive it."""
    with deadline(0.0) as limit:
        with paused_deadlines():
            pass
        await anyio.sleep_forever()
    assert limit.caught


async def test_a_deadline_counts_from_its_construction() -> None:
    """Also before it is armed; a pause extends it as any other."""
    with deadline(0.2, armed=False) as limit:
        assert _ends(limit) == math.inf
        began, clocks = limit.ends, Clocks()
        clocks.pause()
        limit.arm(lambda: None)
        assert _ends(limit) == math.inf
        await some_time(0.05)
        clocks.resume()
        assert _ends(limit) == limit.ends >= began + 0.05
        await anyio.sleep_forever()
    assert limit.caught


async def test_a_deadline_that_is_armed_too_late_expires_at_once() -> None:
    """Code that ran too long before its first wait is cancelled there."""
    with deadline(0.0, armed=False) as limit:
        limit.arm(lambda: None)
        await anyio.sleep_forever()
    assert limit.caught


async def test_a_global_pause_is_reported_first() -> None:
    """With its duration and the number of waiting turns; afterwards it is not listed."""
    with listed_pause("http://a is paused for new weights", lambda: 7):
        assert str(pauses()[0]) == "http://a is paused for new weights for 0.0 s, 7 turns wait"
        assert report().startswith("rollouts: http://a is paused for new weights for 0.0 s, 7 turns wait\n")
    assert pauses() == []


async def test_a_deadline_stays_paused_until_the_last_of_its_waits_ends() -> None:
    """Two turns of a group share its deadline and wait for different servers; each wait may end first."""
    with deadline(60) as limit:
        first, second = Clocks(), Clocks()
        first.pause()
        second.pause()
        second.pause()  # known already
        first.resume()
        assert limit.ends == math.inf
        first.resume()
        assert limit.ends == math.inf
        second.resume()
        assert 59 < limit.ends - anyio.current_time() <= 60
