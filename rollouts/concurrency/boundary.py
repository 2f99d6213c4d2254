"""The boundary around user code: environments, rewards, filters and generate functions.

Invariant: any exception of user code leaves :func:`boundary` as a typed failure with its place, its source line and its
cause, within its deadline. ``KeyboardInterrupt`` and a cancellation from outside pass through unchanged, and so does a
:class:`RolloutsError`; but a :class:`ConfigError`, a :class:`ContextOverflow` or a broken law that an environment, a
reward or a filter raises is their failure. The result of a function that suppressed its deadline or its cancellation is
discarded, and cancel scopes that it leaves open are exited. :func:`waits` lists all code inside a boundary.

This module does not know the code inside.
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
from rollouts.concurrency.deadlines import deadline, exit_scopes_inside
from rollouts.errors import (
    ConfigError,
    ContextOverflow,
    EndpointAway,
    EnvironmentFailure,
    FilterFailure,
    Kind,
    RewardFailure,
    RolloutsError,
    TokenMismatchError,
    current_place,
    source_line,
    text_of,
)

__all__ = ["Wait", "WorkerThread", "abandoned", "boundary", "call_foreign", "function_name", "is_cancelled", "waits"]


@attrs.define(eq=False)
class WorkerThread:
    """A thread that runs user code."""

    ident: int | None = None
    ended: bool = False
    abandoned: bool = False
    """Whether its result is unused."""
    result: Any = None

    def close_unused(self) -> None:
        """Close a coroutine that an abandoned thread returned: without an await it would cause a warning."""
        if self.abandoned and inspect.iscoroutine(self.result):
            self.result.close()


@attrs.frozen
class Wait:
    """A wait in progress: code that is running inside a boundary."""

    place: str
    what: str
    since: float
    """``time.monotonic()`` at its start."""
    deadline: float | None
    """``time.monotonic()`` at its deadline; ``None`` without one."""
    task: asyncio.Task[Any] | None = attrs.field(default=None, repr=False, eq=False)
    """The task that waits."""
    thread: WorkerThread | None = attrs.field(default=None, repr=False, eq=False)
    """The thread that runs the code, if any."""
    shown: str = ""
    """The name of the wait in displays, e.g. ``"the model"``; by default ``what``."""
    kind: Kind = "other"

    def __str__(self) -> str:
        now = time.monotonic()
        left = "" if self.deadline is None else f", {max(0.0, self.deadline - now):.0f} s left"
        return f"{self.place}: {self.what} for {now - self.since:.1f} s{left}"


_ENTERED: dict[boundary, None] = {}
"""The boundaries that code is running inside, in order of entry."""

_ABANDONED: dict[boundary, None] = {}

_OF_USERS = (EnvironmentFailure, RewardFailure, FilterFailure)
"""Failures of code that is the user's alone; a generate function runs the agent loop of this package, too."""


def abandoned() -> list[Wait]:
    """Threads that overran their deadline and still run, oldest first."""
    for entered in list(_ABANDONED):
        if entered.thread is None or entered.thread.ended:
            _ABANDONED.pop(entered, None)
    return [entered.wait() for entered in list(_ABANDONED)]


def waits() -> list[Wait]:
    """All waits in progress in this process, oldest first."""
    return sorted((entered.wait() for entered in list(_ENTERED)), key=lambda wait: wait.since)


class boundary(deadline):  # noqa: N801 - used as `with boundary(...)`, like deadline
    """Run user code: convert its exceptions to ``failure`` with place and cause, and end it after ``seconds``.

    Args:
        failure: the class to raise.
        what: name of the code, for messages and :func:`waits`, e.g. ``"CalculatorEnvironment.step"``.
        seconds: deadline; it cancels awaits. :func:`call_foreign` abandons a thread that blocks.
        thread: the thread that runs the code, if any; :func:`abandoned` lists it if it runs on after the boundary.
        armed: whether the timer starts at once; else it starts at the first wait of a :meth:`guarded` awaitable.
        before_work: whether no rollout has begun, so that a :class:`ConfigError` passes whichever ``failure`` is.
        shown: the name of the wait in displays; ``what`` by default.
        kind: the kind of the wait and of the failure; by default, of the class ``failure``.
        shield: whether cancellations from outside wait until the code inside has ended.

    Raises:
        RolloutsError: ``failure``; or a :class:`RolloutsError` of the code itself, unchanged.
    """

    __slots__ = (
        "_before",
        "_before_work",
        "_failure",
        "_kind",
        "_place",
        "_seconds",
        "_shown",
        "_since",
        "_task",
        "_what",
        "thread",
    )

    def __init__(
        self,
        failure: type[RolloutsError],
        what: str,
        *,
        seconds: float | None = None,
        thread: WorkerThread | None = None,
        armed: bool = True,
        before_work: bool = False,
        shown: str = "",
        kind: Kind | None = None,
        shield: bool = False,
    ) -> None:
        super().__init__(seconds, armed=armed, shield=shield)
        self._before_work = before_work
        self._failure = failure
        self._what = what
        self._seconds = seconds
        self._shown = shown or what
        self._kind: Kind = kind or failure.kind
        self.thread = thread

    def wait(self) -> Wait:
        """The wait of this boundary, for reports."""
        until = None if self._seconds is None else self._since + self._seconds
        return Wait(self._place, self._what, self._since, until, self._task, self.thread, self._shown, self._kind)

    def guarded(self, awaitable: Awaitable[Any], *, grace: float = 10.0) -> CancellationGuard:
        """The guard to await in place of user code's awaitable. Requires ``seconds``, or ``armed=False``."""
        assert self.scope is not None, "an armed boundary without seconds has no cancel scope"
        return CancellationGuard(awaitable, self, self._what, self._place, grace=grace)

    def __enter__(self) -> Self:
        self._task = asyncio.current_task(self._loop)
        self._before = 0 if self._task is None else self._task.cancelling()
        self._place = current_place()
        self._since = time.monotonic()
        super().__enter__()
        _ENTERED[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        raised: BaseException | None = None  # an error that the code inside did not raise
        task = self._task
        cancelled_inside = task is not None and task.cancelling() > self._before
        if error is None and cancelled_inside and not self.expired and is_cancelled():
            error = raised = asyncio.CancelledError()  # suppressed inside: the result is discarded
        left_open = False
        try:
            if super().__exit__(None if error is None else type(error), error, trace):
                error = raised = None
        except BaseException as other:  # noqa: BLE001 - e.g. a group with cancellations removed; sorted below
            left_open = self.scope is not None and isinstance(other, RuntimeError) and exit_scopes_inside(self.scope)
            if left_open:
                error = raised = self._exit_scope(error, trace)
            else:
                error = raised = other
        finally:
            del _ENTERED[self]
            if self.thread is not None and self.thread.ident is not None and not self.thread.ended:
                _ABANDONED[self] = None
        try:
            if error is not None or (self.scope is not None and self.scope.cancel_called):
                self._raise_if_foreign(error)
            elif left_open:
                raise self._failed(f"{self._what} {_LEFT_OPEN}")
            if raised is not None:
                raise raised
        finally:
            error = raised = None  # its traceback refers to this frame: a cycle that only the collector would free
        return False

    def _exit_scope(self, error: BaseException | None, trace: TracebackType | None) -> BaseException | None:
        """Exit the scope after those inside it; return the error that remains."""
        assert self.scope is not None, "it left scopes open inside"
        try:
            return None if self.scope.__exit__(None if error is None else type(error), error, trace) else error
        except BaseException as other:  # noqa: BLE001 - sorted by the caller
            return other

    def _raise_if_foreign(self, error: BaseException | None) -> None:
        """Raise the failure for an error of user code or a missed deadline; return for other errors."""
        what = self._what
        if error is None:
            raise self._failed(f"{what} did not answer within {self._seconds:g} s", late=True)
        text = f"{type(error).__name__}: {text_of(error)}"
        if isinstance(error, asyncio.CancelledError):
            if (self._task is not None and self._task.cancelling() > self._before) or is_cancelled():
                return
            text = "CancelledError: something inside was cancelled, by no enclosing scope"
        elif isinstance(error, BaseExceptionGroup):
            _raise_if_not_foreign(error, self._passes)
        elif self._passes(error):
            if isinstance(error, self._failure) and "kind" not in vars(error):
                error.kind = self._kind  # the code inside raised it itself
            return
        line = source_line(error)
        raise self._failed(f"{what} raised {text}" + (f" ({line})" if line else "")) from error

    def _failed(self, text: str, *, late: bool = False) -> RolloutsError:
        error = self._failure(text)
        error.late, error.kind = late, self._kind
        return error

    def _passes(self, error: BaseException) -> bool:
        """Whether an error leaves unchanged."""
        if isinstance(error, ConfigError | ContextOverflow | TokenMismatchError):
            return self._before_work or not issubclass(self._failure, _OF_USERS)
        if isinstance(error, GeneratorExit):  # the interpreter closes the coroutine, in no task or in another one
            return self._task is None or asyncio.current_task() is not self._task
        return isinstance(error, RolloutsError | KeyboardInterrupt)


def is_cancelled() -> bool:
    """Whether an enclosing cancel scope is cancelled."""
    return anyio.current_effective_deadline() == -math.inf


def _raise_if_not_foreign(group: BaseExceptionGroup[BaseException], passes: Callable[[BaseException], bool]) -> None:
    """Raise a broken law or an outage that passes, without its group, or a signal to the process (Ctrl-C)."""
    found: BaseException | None = group.subgroup(TokenMismatchError) or group.subgroup(EndpointAway)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    if found is not None and passes(found):
        raise found
    if group.subgroup(KeyboardInterrupt) is not None:
        raise group


_LEFT_OPEN = (
    "returned with a cancel scope or a task group open; expected that each call exits what it enters, or that a"
    " separate task keeps it open"
)


async def call_foreign(
    failure: type[RolloutsError],
    what: str,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float | None = None,
    shown: str = "",
    kind: Kind | None = None,
    shield: bool = False,
) -> Any:
    """Call a user's function inside a :func:`boundary`, sync or async.

    A sync function runs in a worker thread, so that it cannot block the event loop; at its deadline the thread is
    abandoned. The time until a thread is free does not count.

    Args:
        function: the function; if it is sync and returns an awaitable, that is awaited with a separate deadline.
        arguments: its arguments.
        failure, what, seconds, shown, kind, shield: as of :class:`boundary`.

    Raises:
        RolloutsError: ``failure``; or a :class:`RolloutsError` of the function, unchanged.
    """
    if _is_async(function):
        with boundary(failure, what, seconds=seconds, armed=False, shown=shown, kind=kind, shield=shield) as entered:
            return await entered.guarded(function(*arguments))
    threads = anyio.to_thread.current_default_thread_limiter()
    with boundary(failure, f"a free thread for {what}", kind="a_free_thread", shield=shield):
        await threads.acquire()
    thread = WorkerThread()

    def work() -> Any:
        thread.ident = threading.get_ident()
        try:
            thread.result = function(*arguments)
            thread.close_unused()
            return thread.result
        finally:
            thread.ended = True

    finished = False
    try:
        with boundary(failure, what, seconds=seconds, thread=thread, shown=shown, kind=kind, shield=shield):
            value = await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        finished = True
    finally:
        threads.release()
        thread.abandoned = not finished
        thread.close_unused()
    if inspect.isawaitable(value):
        with boundary(failure, what, seconds=seconds, armed=False, shown=shown, kind=kind, shield=shield) as entered:
            return await entered.guarded(value)
    return value


def function_name(function: Any) -> str:
    """A name for messages: of the function, of a partial's function, or of an object's class."""
    name = getattr(function, "__name__", None) or getattr(_unwrapped(function), "__name__", None)
    return name or type(_unwrapped(function)).__name__


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_async(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    if type(code) is CodeType and code.co_flags & inspect.CO_COROUTINE:
        return True
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
