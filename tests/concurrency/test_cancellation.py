"""The cancellation guard: the caller of a user coroutine continues, whatever the coroutine does when cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollouts.concurrency.boundary import boundary, call_foreign, waits
from rollouts.concurrency.cancellation import CancellationGuard, left_behind
from rollouts.concurrency.deadlines import Clocks, deadline
from rollouts.concurrency.wait_report import report, where
from rollouts.errors import EnvironmentFailure, at

ROOT = Path(__file__).parents[2]


async def suppresses() -> None:
    while True:
        try:
            await anyio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def spins() -> None:
    while True:
        try:
            await asyncio.sleep(0)  # noqa: TID251 - as user code may
        except asyncio.CancelledError:
            continue


async def hides() -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep_forever()


async def hides_and_suppresses() -> None:
    with anyio.CancelScope(), anyio.CancelScope(shield=True):
        await suppresses()


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """Close the abandoned coroutines before the interpreter ends."""
    before = len(left_behind())
    yield
    for guard in left_behind()[before:]:
        with contextlib.suppress(RuntimeError):
            guard.awaitable.close()  # type: ignore[attr-defined]  # a coroutine


COROUTINES = [suppresses, spins, hides, hides_and_suppresses]


@pytest.mark.parametrize("coroutine", COROUTINES)
async def test_a_deadline_ends_the_wait_for_any_coroutine(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """It raises a late failure. Afterwards the scopes of the task nest, and it can be cancelled again."""
    before = len(left_behind())
    with (
        anyio.fail_after(60),
        at("group 3"),
        pytest.raises(EnvironmentFailure, match="did not answer within") as raised,
    ):
        with boundary(EnvironmentFailure, "World.step", seconds=0.05, armed=False) as entered:
            await entered.guarded(coroutine(), grace=0.1)
    assert raised.value.late
    assert waits() == []
    assert len(left_behind()) - before == (coroutine is not hides)
    if coroutine is not hides:
        assert left_behind()[-1].what == "group 3: World.step"
        assert "test_cancellation.py:" in report()
    with anyio.move_on_after(0.01) as scope, anyio.CancelScope():
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("coroutine", [suppresses, spins])
async def test_a_task_group_that_is_cancelled_ends(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The group does not wait for a coroutine that never ends, though its deadline is far away."""

    async def call() -> None:
        await call_foreign(EnvironmentFailure, "World.step", coroutine, seconds=3600)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.wait_all_tasks_blocked() if coroutine is suppresses else await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert waits() == []


async def test_a_coroutine_may_clean_up_within_its_grace_period() -> None:
    """Awaits behind a shield are not interrupted."""
    cleaned = []

    async def tidy() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(200):
                    await anyio.lowlevel.checkpoint()
                cleaned.append(True)

    with pytest.raises(EnvironmentFailure, match="did not answer"):
        await call_foreign(EnvironmentFailure, "World.step", tidy, seconds=0.05)
    assert cleaned


async def test_results_and_errors_pass_the_guard() -> None:
    """Those of coroutines, and of other awaitables."""

    async def answer(value: int) -> float:
        await anyio.lowlevel.checkpoint()
        return 1 / value

    assert await call_foreign(EnvironmentFailure, "World.step", answer, 2, seconds=9) == 0.5
    with pytest.raises(EnvironmentFailure, match="ZeroDivisionError"):
        await call_foreign(EnvironmentFailure, "World.step", answer, 0, seconds=9)
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(7)
    with deadline(None, armed=False) as around:
        assert await CancellationGuard(future, around, "a future") == 7


async def test_timeouts_of_the_coroutine_itself_are_not_counted() -> None:
    """A coroutine that waits in many short timeouts is not abandoned: no scope around it is cancelled."""

    async def looks_often() -> str:
        for _ in range(125):
            with anyio.move_on_after(0.01):
                await anyio.sleep_forever()
        return "done"

    with deadline(60, armed=False) as around:
        assert await CancellationGuard(looks_often(), around, "a look") == "done"


async def test_a_wait_report_sees_through_the_guard() -> None:
    """The reported line is in the coroutine."""

    async def call() -> None:
        await call_foreign(EnvironmentFailure, "World.step", hides, seconds=9)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        (wait,) = waits()
        assert "in hides" in where(wait)
        assert wait.task is not None
        wait.task.cancel()


_PROGRAM = """
import anyio
from rollouts.concurrency.boundary import call_foreign
from rollouts.errors import EnvironmentFailure
from rollouts.concurrency.cancellation import left_behind
from tests.concurrency.test_cancellation import COROUTINES, refuses_to_end

async def abandon(coroutine):
    try:
        await call_foreign(EnvironmentFailure, "World.step", coroutine, seconds=0.05)
    except EnvironmentFailure:
        pass

async def main():
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for coroutine in [*COROUTINES, refuses_to_end]:
                tasks.start_soon(abandon, coroutine)
    print(len(left_behind()))

anyio.run(main)
"""


async def refuses_to_end() -> None:
    while True:
        try:
            await anyio.sleep(3600)
        except BaseException:  # noqa: BLE001 - as user code may
            continue


def test_an_abandoned_coroutine_is_not_resumed_at_interpreter_exit() -> None:
    """The process ends at once and without output."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )
    assert (done.stdout, done.stderr, done.returncode) == ("4\n", "", 0)


async def test_a_coroutine_whose_first_wait_is_in_a_pause_is_ended_too() -> None:
    """Its grace period begins when the deadline, which the pause has moved, expires."""

    async def call() -> None:
        with boundary(EnvironmentFailure, "World.step", seconds=0.05, armed=False) as entered:
            clocks = Clocks()
            clocks.pause()
            asyncio.get_running_loop().call_later(0.01, clocks.resume)
            await entered.guarded(hides(), grace=0.0)

    with anyio.fail_after(60), pytest.raises(EnvironmentFailure, match="did not answer"):
        await call()


async def test_the_timers_of_a_coroutine_that_ended_keep_nothing() -> None:
    """asyncio keeps a cancelled timer until half of all are: its context would keep the task, with all of a rollout."""
    tasks: list[weakref.ref[Any]] = []

    async def play() -> None:
        tasks.append(weakref.ref(asyncio.current_task()))
        with boundary(EnvironmentFailure, "step", seconds=3600, armed=False) as entered:
            await entered.guarded(anyio.lowlevel.checkpoint())

    gc.collect()
    gc.disable()
    try:
        with anyio.fail_after(600), anyio.fail_after(500), anyio.fail_after(400):  # timers that are due before
            async with anyio.create_task_group() as group:
                group.start_soon(play)
            await anyio.lowlevel.checkpoint()
            assert tasks[0]() is None
    finally:
        gc.enable()


async def test_guards_that_are_due_in_a_second_share_a_timer() -> None:
    """asyncio sorts its timers again when half of them are cancelled: 0.2 s with two for each of 100,000 rollouts."""
    loop: Any = asyncio.get_running_loop()

    async def play() -> None:
        with boundary(EnvironmentFailure, "step", seconds=3600, armed=False) as entered:
            await entered.guarded(anyio.Event().wait())

    before = len(loop._scheduled)
    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(play)
        await anyio.sleep(0.1)
        assert len(loop._scheduled) - before < 1010, "the deadlines, and a few"
        group.cancel_scope.cancel()


def test_no_loop_outlives_its_guards() -> None:
    """A guard is checked by a timer of its loop, which nothing else keeps."""

    async def play() -> weakref.ref[Any]:
        with boundary(EnvironmentFailure, "step", seconds=3600, armed=False) as entered:
            await entered.guarded(anyio.lowlevel.checkpoint())
        return weakref.ref(asyncio.get_running_loop())

    loop = anyio.run(play)
    gc.collect()
    assert loop() is None


async def test_the_timers_that_guards_leave_are_due_within_an_hour() -> None:
    """A deadline of days does not keep a timer of each second in which a rollout started until it ends."""
    loop: Any = asyncio.get_running_loop()
    with boundary(EnvironmentFailure, "step", seconds=1e6, armed=False) as entered:
        await entered.guarded(anyio.lowlevel.checkpoint())
    left = [timer.when() - loop.time() for timer in loop._scheduled if not timer.cancelled()]
    assert 3590 < max(left) < 3602
