"""Clocks that stop: no deadline passes meanwhile, and afterwards each has as much left as before."""

from __future__ import annotations

import math

import anyio

from rollouts.concurrency.deadlines import Clocks, deadline, listed_pause, paused_deadlines, pauses
from rollouts.concurrency.wait_report import report


async def some_time(seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await anyio.sleep_forever()


def _ends(limit: deadline) -> float:
    """When it passes by itself."""
    assert limit.scope is not None
    return limit.scope.deadline


async def test_others_may_stop_the_clocks_of_somebody_who_waits() -> None:
    """All his deadlines, the outer ones too; none of somebody else's."""
    answered = anyio.Event()
    made: list[Clocks] = []
    late: list[bool] = []

    async def waits() -> None:
        with deadline(0.1) as outer, deadline(0.05) as inner:
            made.append(Clocks())
            await answered.wait()
        late.extend([outer.expired, inner.expired])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waits)
        await anyio.wait_all_tasks_blocked()
        made[0].pause()
        with deadline(0.05) as ours:
            await some_time(0.2)
        assert ours.caught
        answered.set()
    assert late == [False, False]


async def test_a_clock_that_goes_on_has_what_was_left() -> None:
    """And it passes then."""
    with deadline(0.2) as limit:
        with paused_deadlines():
            assert _ends(limit) == math.inf
        assert 0 < _ends(limit) - anyio.current_time() <= 0.2
        await anyio.sleep_forever()
    assert limit.caught


async def test_a_deadline_that_has_passed_stays_passed() -> None:
    """It cannot be undone by a pause that comes after it."""
    with deadline(0.0) as limit:
        with paused_deadlines():
            pass
        await anyio.sleep_forever()
    assert limit.caught


async def test_one_that_is_watched_later_has_run_all_the_time() -> None:
    """From when it was made; and it stands still like the others, also before anybody watches it."""
    with deadline(0.2, armed=False) as limit:
        assert _ends(limit) == math.inf
        began, clocks = limit.ends, Clocks()
        clocks.pause()
        limit.arm()
        assert _ends(limit) == math.inf
        await some_time(0.05)
        clocks.resume()
        assert _ends(limit) == limit.ends >= began + 0.05
        await anyio.sleep_forever()
    assert limit.caught


async def test_one_that_had_passed_when_it_is_watched_ends_the_wait() -> None:
    """Code that ran too long before its first wait waits no more."""
    with deadline(0.0, armed=False) as limit:
        limit.arm()
        await anyio.sleep_forever()
    assert limit.caught


async def test_a_standstill_is_told_first() -> None:
    """With how long it lasts, and how many wait; afterwards it is gone."""
    with listed_pause("http://a is paused for new weights", lambda: 7):
        assert str(pauses()[0]) == "http://a is paused for new weights for 0.0 s, 7 turns wait"
        assert report().startswith("rollouts: http://a is paused for new weights for 0.0 s, 7 turns wait\n")
    assert pauses() == []
