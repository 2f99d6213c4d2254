"""The boundary around user code: failures, cancellations, deadlines, threads and the list of waits."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollouts.concurrency.boundary import boundary, call_foreign, function_name, waits
from rollouts.errors import (
    ConfigError,
    EndpointAway,
    EndpointUnavailable,
    EnvironmentFailure,
    Failure,
    FilterFailure,
    GenerateFailure,
    RewardFailure,
    RolloutsError,
    TokenMismatchError,
    at,
    shortened,
)


async def test_an_exception_becomes_the_failure_with_its_cause_and_place() -> None:
    """The failure has the name of the code, its exception with the whole chain of causes, and the place."""

    async def step() -> None:
        raise KeyError("x") from OSError("disk")

    with pytest.raises(RewardFailure, match=r"^judge raised KeyError: 'x' \(.*\)$") as caught:
        await call_foreign(RewardFailure, "judge", step)
    failure = Failure.of(caught.value)
    line = f"{__file__}:{step.__code__.co_firstlineno + 1} in step"
    assert (failure.kind, failure.message) == ("RewardFailure", f"judge raised KeyError: 'x' ({line})")
    assert "OSError: disk" in failure.traceback
    with at("group 3 · sample 1"):
        assert Failure.of(caught.value).place == "group 3 · sample 1"


@pytest.mark.parametrize("error", [EndpointUnavailable("away"), TokenMismatchError("ids"), ConfigError("field")])
async def test_errors_of_the_package_pass_unchanged(error: RolloutsError) -> None:
    """Their cause is known already."""
    with pytest.raises(type(error)) as caught, boundary(GenerateFailure, "x"):
        raise error
    assert caught.value is error


async def test_a_broken_law_is_found_inside_a_group() -> None:
    """A task group wraps it; it is still a broken law and no failure of user code."""
    law = TokenMismatchError("ids")
    with pytest.raises(TokenMismatchError) as caught, boundary(GenerateFailure, "x"):
        raise ExceptionGroup("a", [OSError(), ExceptionGroup("b", [law])])
    assert caught.value is law


async def test_an_outage_is_found_inside_a_group() -> None:
    """A generate function may ask in a task group: its prompt is not lost, as without one. A broken law comes first."""
    away = EndpointAway("no server answers")
    with pytest.raises(EndpointAway) as caught, boundary(GenerateFailure, "x"):
        raise ExceptionGroup("a", [ExceptionGroup("b", [away]), EndpointUnavailable("away")])
    assert caught.value is away
    with pytest.raises(TokenMismatchError), boundary(GenerateFailure, "x"):
        raise ExceptionGroup("a", [away, TokenMismatchError("ids")])


@pytest.mark.parametrize("failure", [EnvironmentFailure, RewardFailure, FilterFailure])
async def test_a_broken_law_in_a_group_of_user_code_is_its_failure(failure: type[RolloutsError]) -> None:
    """As without the group: code that is the user's alone breaks no law, and one bad rollout costs one rollout."""
    law = TokenMismatchError("ids")
    with pytest.raises(failure, match="ids"), boundary(failure, "x"):
        raise law
    with pytest.raises(failure, match="x raised ExceptionGroup"), boundary(failure, "x"):
        raise ExceptionGroup("a", [OSError(), ExceptionGroup("b", [law])])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError()])])
async def test_a_signal_to_the_process_passes(error: BaseException) -> None:
    """Ctrl-C is not a failure of a rollout."""
    with pytest.raises(type(error)) as caught, boundary(GenerateFailure, "x"):
        raise error
    assert caught.value is error


async def test_an_outer_cancellation_passes_and_an_inner_one_does_not() -> None:
    """A cancellation of an enclosing scope reaches that scope; a CancelledError of user code is a failure."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        with boundary(GenerateFailure, "x"):
            await anyio.sleep_forever()
    assert scope.cancelled_caught

    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(GenerateFailure, match="x raised CancelledError: something inside was cancelled"):
        await call_foreign(GenerateFailure, "x", cancelled)


async def test_a_native_cancellation_passes() -> None:
    """``asyncio.timeout`` around a boundary ends as a timeout."""

    async def inside() -> None:
        async with asyncio.timeout(0.01):
            with boundary(GenerateFailure, "x"):
                await anyio.sleep_forever()

    with pytest.raises(TimeoutError):
        await inside()


async def test_a_timeout_that_user_code_catches_is_no_failure() -> None:
    """It is not a cancellation from outside."""

    async def judge() -> float:
        for limit in (partial(asyncio.timeout, 0.01), lambda: anyio.fail_after(0.01)):
            try:
                if isinstance(limit, partial):
                    async with limit():
                        await anyio.sleep_forever()
                else:
                    with limit():
                        await anyio.sleep_forever()
            except TimeoutError:
                continue
        return 0.5

    assert await call_foreign(RewardFailure, "judge", judge, seconds=20) == 0.5


@pytest.mark.parametrize("suppress", [False, True])
async def test_a_missed_deadline_is_a_failure(suppress: bool) -> None:
    """The call fails, even if the function suppresses the cancellation and returns a result."""

    async def judge() -> float:
        try:
            await anyio.sleep_forever()
        except BaseException:
            if not suppress:
                raise
        return 0.0

    with pytest.raises(RewardFailure, match=r"judge did not answer within 0\.02 s"):
        await call_foreign(RewardFailure, "judge", judge, seconds=0.02)


async def test_a_sync_function_does_not_stall_the_loop() -> None:
    """It runs in a thread; at its deadline the thread is abandoned."""
    release = threading.Event()
    try:
        with pytest.raises(RewardFailure, match="did not answer within"):
            await call_foreign(RewardFailure, "judge", release.wait, 30, seconds=0.02)
    finally:
        release.set()


async def test_sync_async_partial_and_object_are_all_called() -> None:
    """The awaitable that a sync function returns is awaited."""

    async def judge(value: int) -> int:
        return value

    class Judge:
        async def __call__(self, value: int) -> int:
            return value

    for function in (judge, lambda value: value, Judge(), lambda value: judge(value)):
        assert await call_foreign(RewardFailure, "judge", function, 7) == 7
        assert await call_foreign(RewardFailure, "judge", partial(function, 7)) == 7


async def test_waits_lists_what_is_waited_for() -> None:
    """Oldest first, with place, duration and time left; afterwards the list is empty."""
    with at("here or there"), boundary(GenerateFailure, "a"), boundary(GenerateFailure, "b", seconds=50):
        first, second = (str(wait) for wait in waits())
    assert first.startswith("here or there: a for 0.")
    assert second.endswith("0 s left")
    assert waits() == []


def test_function_name_unwraps_partials() -> None:
    """An object is named by its class."""
    named: Any = partial(partial(shortened), 1)
    assert function_name(named) == "shortened"
    assert function_name(object()) == "object"


async def test_a_coroutine_that_comes_too_late_is_closed() -> None:
    """A coroutine that an abandoned thread returns causes no warning (an error in these tests)."""
    entered, released, ended = threading.Event(), threading.Event(), threading.Event()

    async def answer() -> int:
        return 1

    def lazily() -> Any:
        entered.set()
        released.wait(30)
        try:
            return answer()
        finally:
            ended.set()

    with anyio.move_on_after(60) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call_foreign, RewardFailure, "lazily", lazily)
            while not entered.is_set():
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert not scope.cancelled_caught
    released.set()
    assert ended.wait(30)
    gc.collect()


@pytest.mark.parametrize("sync", [False, True])
async def test_a_shielded_call_ends_before_a_cancellation(sync: bool) -> None:
    """A cancellation from outside waits for the end of the function, in a task or in a thread."""
    ended: list[str] = []

    async def call() -> None:
        await anyio.lowlevel.checkpoint()
        ended.append("call")

    function = partial(ended.append, "call") if sync else call
    with anyio.CancelScope() as scope:
        scope.cancel()
        await call_foreign(GenerateFailure, "the call", function, seconds=60, shield=True)
        await anyio.lowlevel.checkpoint()
        ended.append("after")
    assert ended == ["call"]
