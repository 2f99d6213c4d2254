"""The wait report: file and line of each wait, in a coroutine, in a thread, and on a blocked event loop."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from rollouts.concurrency.boundary import Wait, abandoned, boundary, call_foreign, waits
from rollouts.concurrency.wait_report import report, where
from rollouts.errors import EnvironmentFailure, RewardFailure, at
from rollouts.views.terminal.waiting import reporting_on_signal


async def hanging_world(event: anyio.Event) -> None:
    await event.wait()  # the line that is waited in


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as lines:
        return next(number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line)


async def test_a_coroutine_is_reported_with_the_line_that_it_waits_in() -> None:
    """Not with a line of the machinery below it or of its caller."""
    event = anyio.Event()

    async def wait() -> None:
        with at("group 3"), boundary(EnvironmentFailure, "World.step"):
            await hanging_world(event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        for _ in range(3):
            await checkpoint()
        (one,) = waits()
        expected = f"test_wait_report.py:{line_of('the line that is waited in')} in hanging_world"
        assert where(one).endswith(expected)
        assert f"group 3: World.step for 0.0 s, in {where(one)}" in report()
        event.set()
    assert report().splitlines()[0] == "rollouts: 0 waits"


async def test_a_hanging_thread_is_reported_with_its_line_and_counted() -> None:
    """The run continues; a thread that ended is not counted."""
    released = threading.Event()
    begun = threading.Event()

    def judge(value: int) -> None:
        begun.set()
        released.wait(20)

    with pytest.raises(RewardFailure, match="did not answer within"):
        await call_foreign(RewardFailure, "judge", judge, 7, seconds=0.2)
    assert begun.is_set()
    (wait,) = abandoned()
    assert "in judge" in where(wait)
    assert "1 abandoned threads still run" in report()
    released.set()
    with anyio.fail_after(10):
        while abandoned():
            await checkpoint()


async def test_an_ended_task_has_no_line() -> None:
    """Its coroutine has no frame any more; the report raises nothing."""

    async def end() -> None:
        return None

    task = asyncio.get_running_loop().create_task(end())
    await task
    assert where(Wait("group 1", "World.step", 0.0, None, task)) == "an unknown place"


class Unformattable:
    """A name whose formatting raises."""

    def __format__(self, form: str) -> str:
        raise LookupError("no text")


class Closed(io.StringIO):
    """A standard error that is closed, or writing another line."""

    def write(self, text: str) -> int:
        raise RuntimeError("reentrant call")


async def test_a_failed_report_raises_nothing() -> None:
    """The error is printed instead; if that fails too, nothing is."""
    output = io.StringIO()
    unformattable: Any = Unformattable()
    for file in (output, Closed()):
        with reporting_on_signal(signal.SIGUSR1, file), boundary(EnvironmentFailure, unformattable):
            os.kill(os.getpid(), signal.SIGUSR1)
            await checkpoint()
    assert output.getvalue() == "rollouts: the report raised LookupError('no text')\n"


async def test_the_signal_is_answered_while_the_loop_is_blocked() -> None:
    """The report contains the current line of the main thread."""
    output = io.StringIO()
    with reporting_on_signal(signal.SIGUSR1, output), at("group 1"), boundary(EnvironmentFailure, "World()"):
        os.kill(os.getpid(), signal.SIGUSR1)
        sum(range(100_000))  # no await anywhere: the loop does not get to run
    assert "group 1: World() for" in output.getvalue()
    assert "the main thread is in" in output.getvalue()
    assert "test_wait_report.py" in output.getvalue()
