"""Who waits for what: in which file and line, whether in a coroutine, a thread, or on a loop that is stuck."""

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
from rollouts.concurrency.wait_report import report, reporting_on_signal, where
from rollouts.errors import EnvironmentFailure, RewardFailure, at


async def forgetful_world(event: anyio.Event) -> None:
    await event.wait()  # the line that is waited in


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as lines:
        return next(number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line)


async def test_a_coroutine_is_told_by_the_line_that_it_waits_in() -> None:
    """Not by the machinery below it, and not by the one who called it."""
    event = anyio.Event()

    async def wait() -> None:
        with at("group 3"), boundary(EnvironmentFailure, "World.step"):
            await forgetful_world(event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        for _ in range(3):
            await checkpoint()
        (one,) = waits()
        expected = f"test_wait_report.py:{line_of('the line that is waited in')} in forgetful_world"
        assert where(one).endswith(expected)
        assert f"group 3: World.step for 0.0 s, in {where(one)}" in report()
        event.set()
    assert report().splitlines()[0] == "rollouts: 0 waits"


async def test_a_thread_that_hangs_is_told_by_its_line_and_counted_while_it_hangs() -> None:
    """The run goes on; when the thread ends after all, it is counted no more."""
    released = threading.Event()
    begun = threading.Event()

    def judge(value: int) -> None:
        begun.set()
        released.wait(20)

    with pytest.raises(RewardFailure, match="did not answer within"):
        await call_foreign(RewardFailure, "judge", judge, 7, seconds=0.2)
    assert begun.is_set()
    (left,) = abandoned()
    assert "in judge" in where(left)
    assert "1 abandoned threads still run" in report()
    released.set()
    with anyio.fail_after(10):
        while abandoned():
            await checkpoint()


async def test_a_task_that_has_ended_stands_nowhere() -> None:
    """Its coroutine has no frame any more, which is no error of whoever looks."""

    async def end() -> None:
        return None

    task = asyncio.get_running_loop().create_task(end())
    await task
    assert where(Wait("group 1", "World.step", 0.0, None, task)) == "a place that is not known"


class Unspeakable:
    """A name that cannot be written."""

    def __format__(self, form: str) -> str:
        raise LookupError("no words")


class Gone(io.StringIO):
    """A standard error that is closed, or in the midst of a line of ours."""

    def write(self, text: str) -> int:
        raise RuntimeError("reentrant call")


async def test_a_report_that_cannot_be_made_costs_nothing() -> None:
    """The signal is answered with why there is none; where that cannot be written either, with nothing."""
    said = io.StringIO()
    unspeakable: Any = Unspeakable()
    for file in (said, Gone()):
        with reporting_on_signal(signal.SIGUSR1, file), boundary(EnvironmentFailure, unspeakable):
            os.kill(os.getpid(), signal.SIGUSR1)
            await checkpoint()
    assert said.getvalue() == "rollouts: no report: it raised LookupError('no words')\n"


async def test_the_signal_answers_also_while_the_loop_is_stuck() -> None:
    """The main thread's own line is in the answer."""
    said = io.StringIO()
    with reporting_on_signal(signal.SIGUSR1, said), at("group 1"), boundary(EnvironmentFailure, "World()"):
        os.kill(os.getpid(), signal.SIGUSR1)
        sum(range(100_000))  # no await anywhere: the loop does not get to run
    assert "group 1: World() for" in said.getvalue()
    assert "the main thread is in" in said.getvalue()
    assert "test_wait_report.py" in said.getvalue()
