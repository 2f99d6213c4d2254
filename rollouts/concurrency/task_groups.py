"""A task group that raises one error of its tasks as it is, where anyio's raises an exception group.

Callers catch errors by their type, and a message has no traceback of a group.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio
from anyio.abc import TaskGroup

from rollouts.errors import TokenMismatchError

__all__ = ["first_error"]


@contextlib.asynccontextmanager
async def first_error() -> AsyncIterator[TaskGroup]:
    """Open a task group. If a task or the body raises, the others are cancelled, and the first error is raised.

    A broken law (:class:`TokenMismatchError`) is raised also if another error came first.
    """
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        errors = group.exceptions
    else:
        return
    try:
        raise next((error for error in errors if isinstance(error, TokenMismatchError)), errors[0])
    finally:
        del errors  # with its traceback, this frame would be a cycle
