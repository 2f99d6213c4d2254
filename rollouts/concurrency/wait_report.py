"""The wait report: global pauses first, then all waits with their start time and source line.

Invariant: a report changes nothing, and works while the event loop is blocked: it needs only the interpreter. This
module knows the list of :func:`rollouts.concurrency.boundary.waits`, but not the code inside a boundary.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rollouts
from rollouts.concurrency.boundary import Wait, abandoned, waits
from rollouts.concurrency.cancellation import CancellationGuard, left_behind
from rollouts.concurrency.deadlines import pauses
from rollouts.errors import is_of_users

__all__ = ["longest", "report", "standing", "where", "where_of_users"]

_MACHINERY = (
    "/anyio/",
    "/asyncio/",
    "/uvloop/",
    "/threading.py",
    "/concurrent/",
    "/rollouts/errors.py",
    "/rollouts/concurrency/cancellation.py",
)
_MAX_LINES = 200
_PACKAGE = str(Path(rollouts.__file__).parent)


def where(wait: Wait) -> str:
    """The innermost source line of a wait outside of the machinery, as ``file:line in function``."""
    return _describe(_frames(wait))


def where_of_users(wait: Wait) -> str:
    """The source line of a user's code that a wait is in; empty if it is in code of this package."""
    for frame in reversed(_frames(wait)):
        name = frame.f_code.co_filename
        if is_of_users(name):
            return _describe([frame])
        if name.startswith(_PACKAGE) and not any(part in name for part in _MACHINERY):
            return ""
    return ""


def _frames(wait: Wait) -> list[types.FrameType]:
    """The frames of a wait, innermost last."""
    frames: list[types.FrameType] = []
    if wait.thread is not None and wait.thread.ident is not None:
        frame = sys._current_frames().get(wait.thread.ident)
        frames = list(_outwards(frame))[::-1]
    elif wait.task is not None:
        frames = list(_inwards(wait.task.get_coro()))
        if frames and frames[-1].f_back is not None:  # the task is running: it has an outer frame
            frames = list(_outwards(frames[-1]))[::-1]
    return frames


def longest(count: int) -> list[str]:
    """The first ``count`` lines of a report without counts: global pauses, then the longest waits."""
    paused = [str(pause) for pause in pauses()[:count]]
    return paused + [f"{wait}, in {where(wait)}" for wait in waits()[: count - len(paused)]]


def standing(frame: types.FrameType) -> str:
    """The innermost source line outside of the machinery of a thread whose current frame is ``frame``."""
    return _describe(list(_outwards(frame))[::-1])


def report(frame: types.FrameType | None = None) -> str:
    """The report as text, waits oldest first; ``frame`` is the current frame of the main thread."""
    now = waits()
    lines = [f"rollouts: {pause}" for pause in pauses()]
    lines += [f"rollouts: {len(now)} waits"]
    lines += [f"  {wait}, in {where(wait)}" for wait in now[:_MAX_LINES]]
    lines += [f"  ... and {len(now) - _MAX_LINES} more"] if len(now) > _MAX_LINES else []
    threads = abandoned()
    lines += [f"rollouts: {len(threads)} abandoned threads still run"] if threads else []
    lines += [f"  {wait}, in {where(wait)}" for wait in threads[:_MAX_LINES]]
    guards = left_behind()
    lines += [f"rollouts: {len(guards)} coroutines suppressed their cancellation and were abandoned"] if guards else []
    lines += [f"  {guard.what}, in {_describe(list(_inwards(guard.awaitable)))}" for guard in guards[:_MAX_LINES]]
    if frame is not None:
        lines.append(f"rollouts: the main thread is in {standing(frame)}")
    return "\n".join(lines)


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
    return next((field for name in names if (field := getattr(value, name, None)) is not None), None)


def _describe(frames: list[types.FrameType]) -> str:
    """The innermost frame outside of the machinery, or else the innermost."""
    relevant = [frame for frame in frames if not any(part in frame.f_code.co_filename for part in _MACHINERY)]
    for frame in (relevant or frames)[-1:]:
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "an unknown place"
