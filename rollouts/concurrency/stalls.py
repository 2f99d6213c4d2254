"""Detection of code that blocks the event loop, by file and line.

Invariant: a stall is located by the stack of the loop's thread during it; a loop that waits for I/O or a timer is
not stalled. It only observes: a thread reads the loop's heartbeat and its stack.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

import anyio
import attrs
from anyio.abc import TaskGroup

from rollouts.concurrency.wait_report import standing
from rollouts.errors import is_of_users

__all__ = ["Stall", "StallWatch"]

_BEAT = 0.005
_WAITING = ("selectors.py", "/asyncio/base_events.py", "/asyncio/runners.py", "/asyncio/events.py", "/uvloop/")


@attrs.frozen
class Stall:
    """One line of code that blocked the loop."""

    place: str
    """``file:line in function``."""
    of_user: bool
    """Whether that is a line of a user. Otherwise no line of a user was running: the machine was busy, or this package
    or a library worked."""
    seconds: float
    """The longest time that it blocked."""
    times: int


class StallWatch:
    """Watches the event loop while its context lasts::

        async with StallWatch() as watch:
            await environment.step(reply)
        assert not watch.stalls

    Args:
        seconds: how long a callback may block the loop.
        on_stall: called from a thread while a line blocks the loop, the first time that it does.
        code: folders of installed packages whose lines count as those of a user.
    """

    def __init__(
        self, seconds: float = 0.05, on_stall: Callable[[Stall], None] | None = None, *, code: tuple[str, ...] = ()
    ) -> None:
        self._seconds = seconds
        self._code = code
        self._on_stall = on_stall
        self._interval = max(_BEAT, seconds / 10)
        self._beat = 0.0
        self._found: dict[tuple[str, bool], tuple[float, int]] = {}
        self._stop = threading.Event()
        self._tasks: TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<StallWatch: {len(self._found)} stalls>"

    @property
    def stalls(self) -> list[Stall]:
        """The stalls, the longest first."""
        stalls = [Stall(*place, seconds, times) for place, (seconds, times) in self._found.items()]
        return sorted(stalls, key=lambda stall: -stall.seconds)

    async def __aenter__(self) -> Self:
        self._beat = time.monotonic()
        self._entered_by = sys._getframe(1).f_code
        self._thread = threading.Thread(target=self._look, args=(threading.get_ident(),), daemon=True)
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._beating)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._tasks is not None
        self._stop.set()
        self._thread.join()  # it polls every few milliseconds
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def _beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await anyio.sleep(self._interval)

    def _look(self, ident: int) -> None:
        counted: dict[tuple[str, bool], float] = {}
        while not self._stop.wait(self._interval):
            beat = self._beat
            still = time.monotonic() - beat
            frame = sys._current_frames().get(ident)
            if still < self._seconds or frame is None or _waits(frame):
                continue
            place = self._place(frame)
            longest, times = self._found.get(place, (0.0, 0))
            self._found[place] = (max(longest, still), times + (counted.get(place) != beat))
            if not times and self._on_stall is not None:
                self._on_stall(Stall(*place, still, 1))
            counted[place] = beat

    def _place(self, frame: FrameType) -> tuple[str, bool]:
        """The innermost line of a user inside the context, and True; without one the innermost line, and False."""
        inner: FrameType | None = frame
        while inner is not None:
            name = inner.f_code.co_filename
            if (is_of_users(name) and not _is_script(name)) or (self._code and name.startswith(self._code)):
                return f"{name}:{inner.f_lineno} in {inner.f_code.co_name}", True
            if inner.f_code is self._entered_by:
                break  # the lines outside of it only wait for what is inside
            inner = inner.f_back
        return standing(frame), False


def _is_script(name: str) -> bool:
    """Whether a file is the script of a command, such as ``bin/rollouts``: it is the outermost frame of every run."""
    return not name.endswith(".py") and os.path.realpath(name).startswith(_SCRIPTS)


_SCRIPTS = os.path.join(os.path.realpath(sysconfig.get_path("scripts")), "")


def _waits(frame: FrameType) -> bool:
    """Whether the loop is between two callbacks, so that no callback blocks it."""
    return any(part in frame.f_code.co_filename for part in _WAITING)
