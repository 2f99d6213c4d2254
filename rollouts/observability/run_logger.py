"""The protocol of a logger of a run's batches, and the queues from a run to its loggers.

Invariant: a logger cannot delay or fail a run. Each has a queue and is called in threads; a logger that raises, or does
not answer within a minute, is off for the rest of the run, which is reported on standard error. Only an error of
``begin``, before the first rollout, ends the run. This module knows no service.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import anyio
import attrs

from rollouts.base.terminal import say
from rollouts.concurrency.boundary import call_foreign
from rollouts.errors import RolloutsError

__all__ = ["Log", "LoggedRun", "RunLogger", "logging_to"]

_SECONDS = 60.0
"""Most seconds of one call of a logger."""
_END_SECONDS = 120.0
"""Most seconds for what is queued when a run ends."""


@attrs.frozen
class LoggedRun:
    """The description of a run for its loggers."""

    name: str
    """The name of its folder."""
    id: str
    """Unique; a resumed run has the same."""
    path: Path
    description: Mapping[str, Any] = MappingProxyType({})
    """The content of ``run.json``: recipe, config, endpoint without keys, versions."""
    first_step: int = 0
    """Number of the first batch of this process; larger than 0 in a resumed run."""


@runtime_checkable
class RunLogger(Protocol):
    """Receives the numbers of a run's batches. Methods are called one at a time, in threads."""

    def begin(self, run: LoggedRun) -> None:
        """Called once, before the first rollout."""
        ...

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Called with the metrics of each batch, as in ``metrics.jsonl``, and its number."""
        ...

    def finish(self, status: str) -> None:
        """Called once, with ``finished``, ``stopped`` or ``failed``."""
        ...


@attrs.define
class Log:
    """The queues of a run's loggers."""

    status: str = "failed"
    """How the run ended; set before the context of :func:`logging_to` ends."""
    _queues: list[Any] = attrs.field(factory=list)

    def batch(self, numbers: Mapping[str, float]) -> None:
        """Queue the metrics of a batch; never waits."""
        for queue in self._queues:
            with contextlib.suppress(anyio.BrokenResourceError):  # this logger is off
                queue.send_nowait((dict(numbers), int(numbers["batch"])))


@contextlib.asynccontextmanager
async def logging_to(loggers: Sequence[RunLogger], run: LoggedRun) -> AsyncIterator[Log]:
    """Begin the loggers, pass them the values of the :class:`Log`, and finish them.

    Raises:
        RolloutsError: a logger could not begin.
    """
    log, failure = Log(), None
    for number, logger in enumerate(loggers):
        try:
            await _call(logger, "begin", run)
        except RolloutsError:
            for begun in loggers[:number]:
                await _finish(begun, "failed")
            raise
    async with anyio.create_task_group() as tasks, contextlib.AsyncExitStack() as queues:
        for logger in loggers:
            send, receive = anyio.create_memory_object_stream[tuple[Mapping[str, float], int]](math.inf)
            log._queues.append(await queues.enter_async_context(send))
            tasks.start_soon(_feed, logger, receive, log)
        try:
            yield log
        except Exception as error:  # noqa: BLE001 - raised below: the task group would wrap it
            failure = error
        tasks.cancel_scope.deadline = anyio.current_time() + _END_SECONDS
    if tasks.cancel_scope.cancelled_caught:
        _warn(f"the loggers did not end within {_END_SECONDS:g} s; batches may be missing there, metrics.jsonl has all")
    if failure is not None:
        raise failure


async def _feed(logger: RunLogger, receive: Any, log: Log) -> None:
    """Pass queued batches to a logger until the run ends, then finish it; an error turns the logger off."""
    try:
        with receive:
            async for numbers, step in receive:
                await _call(logger, "log", numbers, step)
    except RolloutsError as error:
        _warn(f"{error}; this logger is off, the run continues")
    await _finish(logger, log.status)


async def _finish(logger: RunLogger, status: str) -> None:
    try:
        await _call(logger, "finish", status)
    except RolloutsError as error:
        _warn(str(error))


async def _call(logger: RunLogger, method: str, *arguments: Any) -> None:
    name = getattr(logger, "name", type(logger).__name__)
    await call_foreign(RolloutsError, f"{name}.{method}", getattr(logger, method), *arguments, seconds=_SECONDS)


def _warn(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        say(f"rollouts: {text}", file=sys.stderr, flush=True)
