"""The task group that raises the first error as it is."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from rollouts.concurrency.task_groups import first_error
from rollouts.errors import RewardFailure, TokenMismatchError


async def failing(error: BaseException) -> None:
    await anyio.lowlevel.checkpoint()
    raise error


async def failing_when_cancelled(error: Exception) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        raise error


async def in_group(*errors: BaseException, late: Sequence[Exception] = (), body: Exception | None = None) -> None:
    """Run a task for each error, a task for each late one, which is raised on cancellation, and a body."""
    async with first_error() as tasks:
        for error in late:
            tasks.start_soon(failing_when_cancelled, error)
        for task_error in errors:
            tasks.start_soon(failing, task_error)
        if body is not None:
            raise body
        await anyio.sleep_forever()


@pytest.mark.parametrize("error", [RewardFailure("a"), ExceptionGroup("of a user", [OSError()]), GeneratorExit()])
async def test_the_error_of_a_task_is_raised_as_it_is(error: BaseException) -> None:
    """Also if it is a group itself; the other tasks and the body are cancelled."""
    with pytest.raises(type(error)) as caught:
        await in_group(error)
    assert caught.value is error


@pytest.mark.parametrize("error", [RewardFailure("a"), ExceptionGroup("of a user", [OSError()])])
async def test_the_error_of_the_body_is_raised_as_it_is(error: Exception) -> None:
    """Its cause and context are not changed."""
    with pytest.raises(type(error)) as caught:
        await in_group(body=error)
    assert (caught.value, caught.value.__cause__, caught.value.__context__) == (error, None, None)


async def test_the_first_of_several_errors_is_raised() -> None:
    """An error that a cancelled task raises later does not replace it."""
    with pytest.raises(RewardFailure, match="first"):
        await in_group(RewardFailure("first"), late=[OSError("later")])


async def test_a_broken_law_goes_before_other_errors() -> None:
    """It is a bug, which no failure of a user's code hides."""
    with pytest.raises(TokenMismatchError):
        await in_group(RewardFailure("first"), late=[TokenMismatchError("ids differ")])


async def test_without_an_error_nothing_is_raised() -> None:
    """Tasks end by themselves, or by the cancel scope of the group; an outer cancellation passes."""
    async with first_error() as tasks:
        tasks.start_soon(anyio.lowlevel.checkpoint)
        tasks.start_soon(anyio.sleep_forever)
        tasks.cancel_scope.cancel()
    with anyio.CancelScope() as outer:
        async with first_error() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            outer.cancel()
            await anyio.sleep_forever()
    assert outer.cancelled_caught
