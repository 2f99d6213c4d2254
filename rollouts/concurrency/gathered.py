"""Several coroutines at once, and their results in order."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollouts.concurrency.task_groups import first_error

__all__ = ["gather"]

_Result = TypeVar("_Result")


async def gather(*coroutines: Coroutine[Any, Any, _Result]) -> list[_Result]:
    """Run coroutines concurrently; if one raises, the others are cancelled, and its error is raised.

    Returns:
        Their results, in the order of the arguments.
    """
    results: dict[int, _Result] = {}

    async def run(number: int) -> None:
        results[number] = await coroutines[number]

    with contextlib.ExitStack() as stack:
        for coroutine in coroutines:
            stack.callback(coroutine.close)  # else a coroutine that never began is reported as not awaited
        async with first_error() as tasks:
            for number in range(len(coroutines)):
                tasks.start_soon(run, number)
    return [results[number] for number in range(len(coroutines))]
