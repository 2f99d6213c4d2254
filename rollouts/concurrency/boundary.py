"""The boundary that foreign code runs inside.

Invariant: whatever an environment, a reward, a filter or a generate function raises leaves :func:`boundary` as a typed
failure with its place and its cause, within its deadline; a broken law of our own passes through unchanged, and so does
a cancellation that is ours. The result of a function that swallowed its deadline or its cancellation is not used.
While something runs inside a boundary, :func:`waits` lists it.

This module knows nothing of what runs inside.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable
from types import CodeType, TracebackType
from typing import Any, Literal, Self

import anyio.to_thread
import attrs

from rollouts.concurrency.cancellation import CancellationGuard
from rollouts.concurrency.deadlines import deadline
from rollouts.errors import RolloutsError, TokenMismatchError, current_place

__all__ = ["Wait", "WorkerThread", "abandoned", "boundary", "call_foreign", "function_name", "waits"]


@attrs.define(eq=False)
class WorkerThread:
    """A thread that runs foreign code."""

    ident: int | None = None
    ended: bool = False
    given_up: bool = False
    """Nobody takes its answer any more."""
    answer: Any = None

    def discard(self) -> None:
        """Close an answer that nobody takes: a coroutine that was never awaited would complain."""
        if self.given_up and inspect.iscoroutine(self.answer):
            self.answer.close()


@attrs.frozen
class Wait:
    """Something that is being waited for at this moment."""

    place: str
    what: str
    since: float
    """``time.monotonic()`` when it began."""
    deadline: float | None
    """``time.monotonic()`` when it is given up, or ``None``."""
    task: asyncio.Task[Any] | None = attrs.field(default=None, repr=False, eq=False)
    """Who waits."""
    thread: WorkerThread | None = attrs.field(default=None, repr=False, eq=False)
    """Where it is done, if in a thread."""

    def __str__(self) -> str:
        now = time.monotonic()
        left = "" if self.deadline is None else f", {max(0.0, self.deadline - now):.0f} s left"
        return f"{self.place}: {self.what} for {now - self.since:.1f} s{left}"


_OPEN: dict[boundary, None] = {}
"""Those that something runs inside now."""


_ABANDONED: dict[boundary, None] = {}


def abandoned() -> list[Wait]:
    """Threads that overran their deadline and still run, oldest first."""
    for left in list(_ABANDONED):
        if left.thread is None or left.thread.ended:
            _ABANDONED.pop(left, None)
    return [left.wait() for left in list(_ABANDONED)]


def waits() -> list[Wait]:
    """Everything that this process waits for now, oldest first."""
    return sorted((entered.wait() for entered in list(_OPEN)), key=lambda wait: wait.since)


class boundary(deadline):  # noqa: N801 - used as `with boundary(...)`, in place of a generator, as a deadline is
    """Run foreign code: what escapes becomes ``failure``, attributed, and nothing runs longer than ``seconds``.

    Args:
        failure: the class to raise.
        what: what runs, for the message and for :func:`waits`, e.g. ``"CalculatorEnvironment.step"``.
        seconds: deadline; it ends awaits. A thread that blocks is abandoned by whoever started it.
        thread: where it runs, if in a thread; listed by :func:`abandoned` when it goes on after us.
        watched: whether the deadline passes by itself; else from the first wait of what is :meth:`leashed` on.

    Raises:
        RolloutsError: ``failure``; or, unchanged, an error that already is one of the house.
    """

    __slots__ = ("_before", "_failure", "_place", "_seconds", "_since", "_task", "_what", "thread")

    def __init__(
        self,
        failure: type[RolloutsError],
        what: str,
        *,
        seconds: float | None = None,
        thread: WorkerThread | None = None,
        armed: bool = True,
    ) -> None:
        super().__init__(seconds, armed=armed)
        self._failure = failure
        self._what = what
        self._seconds = seconds
        self.thread = thread

    def wait(self) -> Wait:
        """What is waited for inside, to look at."""
        until = None if self._seconds is None else self._since + self._seconds
        return Wait(self._place, self._what, self._since, until, self._task, self.thread)

    def guarded(self, awaitable: Awaitable[Any], *, grace: float = 10.0) -> CancellationGuard:
        """What to await instead of foreign code's awaitable, inside; one without ``seconds`` is made not watched."""
        assert self.scope is not None, "what nothing can end has no scope to leave"
        return CancellationGuard(awaitable, self, self._what, self._place, grace=grace)

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()
        self._place = current_place()
        self._since = time.monotonic()
        super().__enter__()
        _OPEN[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        raised: BaseException | None = None  # not by what ran inside
        if error is None and self._is_asked_to_end() and not self.expired and _is_cancelled():
            error = raised = asyncio.CancelledError()  # swallowed inside: what it answered is no answer
        try:
            if super().__exit__(None if error is None else type(error), error, trace):
                error = raised = None
        except BaseException as other:  # noqa: BLE001 - what a group holds beside its cancellations; told apart below
            error = raised = other
        finally:
            del _OPEN[self]
            if self.thread is not None and self.thread.ident is not None and not self.thread.ended:
                _ABANDONED[self] = None
        try:
            if error is not None or self.expired:
                self._raise_if_foreign(error)
            if raised is not None:
                raise raised
        finally:
            error = raised = None  # its traceback holds this frame: nothing but a collector would free the two
        return False

    def _raise_if_foreign(self, error: BaseException | None) -> None:
        """Raise the failure that an error of foreign code is, or that it was too late; others may go on."""
        failure, what = self._failure, self._what
        if error is None:
            raise _failure(failure, what, f"{what} did not answer within {self._seconds:g} s", late=True)
        if isinstance(error, RolloutsError):
            return
        if isinstance(error, asyncio.CancelledError):
            if not self._is_asked_to_end() and not _is_cancelled():
                text = f"{what} raised CancelledError: something inside was cancelled, and not by us"
                raise _failure(failure, what, text) from error
        elif isinstance(error, Exception | SystemExit | BaseExceptionGroup):
            if isinstance(error, BaseExceptionGroup):
                _raise_what_is_not_foreign(error)
            raise _failure(failure, what, f"{what} raised {type(error).__name__}: {_text(error)}") from error

    def _is_asked_to_end(self) -> bool:
        """Whether the task was cancelled inside."""
        return self._task is not None and self._task.cancelling() > self._before


def _failure(kind: type[RolloutsError], what: str, text: str, *, late: bool = False) -> RolloutsError:
    error = kind(text)
    error.what, error.late = what, late
    return error


def _is_cancelled() -> bool:
    """Whether a cancel scope around us has been cancelled."""
    return anyio.current_effective_deadline() == -math.inf


def _raise_what_is_not_foreign(group: BaseExceptionGroup[BaseException]) -> None:
    """A group may hold, beside a guest's errors, a broken law of ours, or a signal to the process."""
    broken: BaseException | None = group.subgroup(TokenMismatchError)
    while isinstance(broken, BaseExceptionGroup):
        broken = broken.exceptions[0]
    if broken is not None:
        raise broken
    if group.subgroup(lambda error: not isinstance(error, Exception | SystemExit | BaseExceptionGroup)) is not None:
        raise group


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception that cannot be printed is still only a guest's exception
        return "(an error that cannot be printed)"


async def call_foreign(
    failure: type[RolloutsError], what: str, function: Callable[..., Any], *arguments: Any, seconds: float | None = None
) -> Any:
    """Call a user's function inside a :func:`boundary`, sync or async.

    A sync one runs in a worker thread, so it cannot stall the loop; at its deadline the thread is abandoned. The time
    that it stands in line for a thread is not counted against it.
    """
    if _is_async(function):
        with boundary(failure, what, seconds=seconds, armed=False) as entered:
            return await entered.guarded(function(*arguments))
    threads = anyio.to_thread.current_default_thread_limiter()
    with boundary(failure, f"a free thread for {what}"):
        await threads.acquire()
    thread = WorkerThread()

    def work() -> Any:
        thread.ident = threading.get_ident()
        try:
            thread.answer = function(*arguments)
            thread.discard()
            return thread.answer
        finally:
            thread.ended = True

    taken = False
    try:
        with boundary(failure, what, seconds=seconds, thread=thread):
            value = await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        taken = True
    finally:
        threads.release()
        thread.given_up = not taken
        thread.discard()
    if inspect.isawaitable(value):
        with boundary(failure, what, seconds=seconds, armed=False) as entered:
            return await entered.guarded(value)
    return value


def function_name(function: Any) -> str:
    """A name for messages: that of a function, of a partial's function, or of an object's class."""
    function = _unwrapped(function)
    return getattr(function, "__name__", None) or type(function).__name__


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_async(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType) and code.co_flags & inspect.CO_COROUTINE:
        return True
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
