"""Who waits for what, since when, in which file and line.

Invariant: it only looks, and it can look while the event loop is stuck: it needs nothing but the interpreter. What goes
wrong with a report on a signal is raised nowhere. This module knows what
:func:`rollouts.concurrency.boundary.waits` lists, and nothing of what is done there.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any, TextIO

from rollouts.concurrency.boundary import Wait, abandoned, waits
from rollouts.concurrency.cancellation import CancellationGuard, left_behind
from rollouts.concurrency.deadlines import pauses
from rollouts.errors import shortened

__all__ = ["report", "reporting_on_signal", "standing", "where"]

_MACHINERY = (
    "/anyio/",
    "/asyncio/",
    "/uvloop/",
    "/threading.py",
    "/concurrent/",
    "/rollouts/errors.py",
    "/rollouts/concurrency/cancellation.py",
)
_SHOWN = 200


def where(wait: Wait) -> str:
    """The innermost line of foreign or own code that a wait stands in, as ``file:line in function``."""
    frames: list[types.FrameType] = []
    if wait.thread is not None and wait.thread.ident is not None:
        frame = sys._current_frames().get(wait.thread.ident)
        frames = list(_outwards(frame))[::-1]
    elif wait.task is not None:
        frames = list(_inwards(wait.task.get_coro()))
        if frames and frames[-1].f_back is not None:  # it runs at this moment: the loop is inside it
            frames = list(_outwards(frames[-1]))[::-1]
    return _describe(frames)


def standing(frame: types.FrameType) -> str:
    """The innermost line of foreign or own code of a thread that stands in ``frame``."""
    return _describe(list(_outwards(frame))[::-1])


def report(frame: types.FrameType | None = None) -> str:
    """Everything that is waited for, oldest first; ``frame`` is what the main thread was doing."""
    now = waits()
    lines = [f"rollouts: {standstill}" for standstill in pauses()]
    lines += [f"rollouts: {len(now)} waits"]
    lines += [f"  {wait}, in {where(wait)}" for wait in now[:_SHOWN]]
    lines += [f"  ... and {len(now) - _SHOWN} more"] if len(now) > _SHOWN else []
    left = abandoned()
    lines += [f"rollouts: {len(left)} abandoned threads still run"] if left else []
    lines += [f"  {wait}, in {where(wait)}" for wait in left[:_SHOWN]]
    gone = left_behind()
    lines += [f"rollouts: {len(gone)} coroutines were let go, which swallowed their cancellation"] if gone else []
    lines += [f"  {leash.what}, in {_describe(list(_inwards(leash.awaitable)))}" for leash in gone[:_SHOWN]]
    if frame is not None:
        lines.append(f"rollouts: the main thread is in {standing(frame)}")
    return "\n".join(lines)


@contextlib.contextmanager
def reporting_on_signal(number: int = getattr(signal, "SIGUSR1", 0), file: TextIO | None = None) -> Iterator[None]:
    """Write a :func:`report` to standard error whenever the process gets the signal; also while the loop is stuck."""
    if not number:  # a platform without it
        yield
        return

    def tell(_: int, frame: types.FrameType | None) -> None:
        try:
            text = report(frame)
        except Exception as error:  # noqa: BLE001 - it would be raised in whatever line the main thread is at
            text = f"rollouts: no report: it raised {shortened(error)}"
        with contextlib.suppress(Exception, SystemExit):  # closed, or in the midst of another line
            print(text, file=file or sys.stderr, flush=True)

    before = signal.signal(number, tell)
    try:
        yield
    finally:
        signal.signal(number, before)


def _inwards(awaitable: Any) -> Iterator[types.FrameType]:
    """The frames of a suspended coroutine, outermost first."""
    while awaitable is not None:
        frame = _first(awaitable, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            yield frame
        if frame is not None and frame.f_code is CancellationGuard.__await__.__code__:
            awaitable = frame.f_locals["self"].awaitable
            continue
        awaitable = _first(awaitable, "cr_await", "gi_yieldfrom", "ag_await")


def _outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frames of a thread, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _first(value: Any, *names: str) -> Any:
    return next((found for name in names if (found := getattr(value, name, None)) is not None), None)


def _describe(frames: list[types.FrameType]) -> str:
    """The innermost frame that is not machinery, or the innermost."""
    own = [frame for frame in frames if not any(part in frame.f_code.co_filename for part in _MACHINERY)]
    for frame in (own or frames)[-1:]:
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "a place that is not known"
