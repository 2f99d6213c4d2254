"""Execution of a recipe: fill batches and write them.

Invariant: however a run ends (finished, stopped, out of data, an error), every settled group is on disk exactly once
and ``run.json`` accounts for each prompt. This module knows neither the command line nor the display; they pass a stop
and an observer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import anyio.to_thread
import attrs

from rollouts.base.terminal import say
from rollouts.concurrency.boundary import function_name
from rollouts.concurrency.gc_pauses import calm_collector, free
from rollouts.concurrency.task_groups import first_error
from rollouts.errors import JournalError, RolloutsError, shortened
from rollouts.recipe import Recipe
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.writer import RunStatus, RunWriter
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.metrics import Accounting, RunMetrics
from rollouts.training.types import Sample

if TYPE_CHECKING:
    from rollouts.observability.run_logger import RunLogger
    from rollouts.training.manager_state import ManagerState

__all__ = ["RunResult", "Stop", "Watch", "abandon", "observe", "run"]


class Stop:
    """A request to end a run and keep finished work; ``error`` is the reason, if it is a failure."""

    def __init__(self) -> None:
        self.error: RolloutsError | None = None
        self._requested = anyio.Event()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def ask(self, error: RolloutsError | None = None) -> None:
        self.error = self.error or error
        self._requested.set()

    async def wait(self) -> None:
        await self._requested.wait()


_KEPT_METRICS = 100


@attrs.frozen
class RunResult:
    """The result of a run."""

    status: RunStatus
    accounting: Accounting
    unbatched: int
    """Returned prompts whose groups were accepted and are in no batch."""
    run_metrics: RunMetrics
    batches: int
    batch_metrics: tuple[Mapping[str, float], ...]
    """Metrics of the last 100 batches; ``metrics.jsonl`` has all."""
    seconds: float
    error: RolloutsError | None = None
    """Why it ended early; ``None`` if it finished or was stopped."""


Watch: TypeAlias = Callable[[AsyncRolloutManager], Coroutine[Any, Any, None]]
"""An observer that runs concurrently with the run and is cancelled at its end."""

Deliver: TypeAlias = Callable[[list[Sample]], Awaitable[None]]
"""Receives the samples of a batch that is on disk; the next batch waits for it."""


async def observe(watch: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
    """Await an observer; an error in it is printed to standard error and ends the observer, not the run."""
    try:
        await watch(*arguments)
    except (KeyboardInterrupt, anyio.get_cancelled_exc_class()):
        raise
    except BaseException as error:  # noqa: BLE001 - rich raises SystemExit where its pipe is closed
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno} in {frame.name}"
        text = f"rollouts: {function_name(watch)} is off, it raised {shortened(error)} at {place}; the run continues"
        with contextlib.suppress(OSError, ValueError):  # standard error is closed, too
            say(text, file=sys.stderr, flush=True)


def abandon(recipe: Recipe, writer: RunWriter, accounting: Accounting | None, error: BaseException) -> None:
    """Write the end of a run whose files exist, and in which no rollout is in flight."""
    accounting, _ = _settled(accounting or Accounting(), writer.batches * recipe.config.batch_size)
    cancelled = isinstance(error, asyncio.CancelledError)
    with contextlib.suppress(OSError):  # run.json keeps "running": the run can be resumed, as after a kill
        writer.finish("stopped" if cancelled else "failed", accounting, error=None if cancelled else described(error))


async def run(
    recipe: Recipe,
    writer: RunWriter,
    *,
    stop: Stop | None = None,
    watch: Watch | None = None,
    run_journal: RunJournal | None = None,
    state: ManagerState | None = None,
    on_batch: Callable[[Mapping[str, float]], None] | None = None,
    loggers: Sequence[RunLogger] = (),
    deliver: Deliver | None = None,
    trains_here: bool = False,
) -> RunResult:
    """Fill ``recipe.batches`` batches and write them; end early on ``stop``, at the end of the data, or at an error.

    Args:
        recipe: the run's recipe.
        writer: writes batches and groups.
        stop: requests an early end.
        watch: an observer; its errors do not affect the run, see :func:`observe`.
        run_journal: receives every event before it counts; without one the run cannot be resumed.
        state: the state of an earlier process; the recipe's buffer must be at the same position.
        on_batch: called with the metrics of each batch when it is written; must not raise.
        loggers: receive these metrics, too; their errors do not affect the run.
        deliver: receives the samples of each batch when it is written; the next batch begins when it returns.
        trains_here: whether a trainer works in this process, see :func:`calm_collector`.

    Returns:
        The result; the reason of an early end is in ``error``, and in ``run.json``.

    Raises:
        ConfigError: the recipe samples greedily, and its filter drops groups of equal rewards.
        RolloutsError: a logger cannot begin.
        Exception: an error that is not a RolloutsError, after everything is written.
    """
    recipe.check_spread()
    with calm_collector(shared=trains_here):  # a pause for garbage collection stops every rollout
        if not loggers:
            return await _run(recipe, writer, stop, watch, run_journal, state, on_batch, deliver)
        from rollouts.observability.run_logger import LoggedRun, logging_to  # here: few runs have loggers

        log_id, described_run = writer.log_identity()
        logged = LoggedRun(writer.path.resolve().name, log_id, writer.path, described_run, writer.batches)
        try:
            async with logging_to(loggers, logged) as log:

                def on_each(numbers: Mapping[str, float]) -> None:
                    if on_batch is not None:
                        on_batch(numbers)
                    log.batch(numbers)

                result = await _run(recipe, writer, stop, watch, run_journal, state, on_each, deliver)
                log.status = result.status
                return result
        except RolloutsError as error:
            if not writer.finished:
                abandon(recipe, writer, None if state is None else state.accounting, error)
            raise


async def _run(
    recipe: Recipe,
    writer: RunWriter,
    stop: Stop | None,
    watch: Watch | None,
    run_journal: RunJournal | None,
    state: ManagerState | None,
    on_batch: Callable[[Mapping[str, float]], None] | None,
    deliver: Deliver | None,
) -> RunResult:
    stop = stop or Stop()
    began = anyio.current_time()
    error: BaseException | None = None
    finished = False
    metrics: deque[Mapping[str, float]] = deque(maxlen=_KEPT_METRICS)
    manager = AsyncRolloutManager(recipe.config, recipe.data_buffer, on_group=writer.on_group, rollout_log=run_journal)
    if state is not None:
        manager.restore(state)
    try:
        async with first_error() as tasks:
            tasks.start_soon(_cancel_when_asked, stop, tasks.cancel_scope)
            if watch is not None:
                tasks.start_soon(observe, watch, manager)
            async with recipe.lifetime or contextlib.nullcontext(), manager:
                for _ in range(manager.batches, recipe.batches):
                    samples = await _one_batch(manager, writer, run_journal)
                    metrics.append(manager.metrics)  # before a stop can end the run: the batch is written
                    if on_batch is not None:
                        on_batch(manager.metrics)
                    if deliver is not None:
                        await deliver(samples)
                    batch = [*samples]  # a caller may keep its list
                    del samples
                    await anyio.to_thread.run_sync(free, batch)
            finished = True
            tasks.cancel_scope.cancel()
    except RolloutsError as raised:
        error = raised
    except BaseException as raised:
        if not finished and not isinstance(raised, asyncio.CancelledError):
            error = raised
        raise
    finally:
        if stop.requested and not finished:
            error = stop.error or error
        status: RunStatus = "finished" if finished else "failed" if error else "stopped"
        accounting, unbatched = _settled(manager.accounting, writer.batches * recipe.config.batch_size)
        with anyio.CancelScope(shield=True):
            if run_journal is not None:  # the journal of a run that ended is on disk: damage in it is not a torn tail
                with contextlib.suppress(JournalError):
                    await run_journal.journal.sync()
            finish = functools.partial(writer.finish, status, accounting, error=described(error) if error else None)
            try:
                await anyio.to_thread.run_sync(finish)
            except OSError as full:  # the journal has everything that the files lack
                text = f"the end of the run cannot be written to {writer.path}: {full}; rollouts run --resume continues"
                status, error = "failed", error or RolloutsError(text)
    assert error is None or isinstance(error, RolloutsError), "any other error was raised"
    seconds = anyio.current_time() - began
    return RunResult(status, accounting, unbatched, manager.run_metrics, writer.batches, tuple(metrics), seconds, error)


async def _one_batch(manager: AsyncRolloutManager, writer: RunWriter, run_journal: RunJournal | None) -> list[Sample]:
    samples = await manager.generate_batch()
    with anyio.CancelScope(shield=True):  # a batch that was handed out is written, even if the run is stopped now
        if run_journal is not None:
            await run_journal.journal.sync()  # the journal seals a batch on disk before the batch has a file
        try:
            counts = attrs.evolve(manager.accounting)
            await anyio.to_thread.run_sync(writer.write_batch, samples, manager.metrics, counts)
        except OSError as error:
            raise RolloutsError(f"batch {writer.batches} cannot be written to {writer.path}: {error}") from error
    return samples


def described(error: BaseException) -> str:
    """The text of an error in ``run.json``, never empty; an error that is not ours has its type."""
    return str(error) if isinstance(error, RolloutsError) and str(error) else shortened(error)


async def _cancel_when_asked(stop: Stop, scope: anyio.CancelScope) -> None:
    await stop.wait()
    scope.cancel()


def _settled(accounting: Accounting, in_batch: int) -> tuple[Accounting, int]:
    """The final accounting, given the number of groups in written batches; and the number of unbatched groups.

    Prompts of unbatched groups count as returned: no trainer has seen them. This includes a batch whose write failed.
    """
    unbatched = accounting.ready + accounting.in_batch - in_batch
    returned = accounting.returned + unbatched
    return attrs.evolve(accounting, in_batch=in_batch, ready=0, returned=returned), unbatched
