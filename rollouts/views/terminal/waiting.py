"""The waits of rollouts, in words: for the model, a tool, a reward, a pause; all of them at a signal.

Invariant: each task counts once, by the innermost code that it waits for; the longest wait comes first. A source line
is named only where it is a user's. An error while a signal is answered is never raised.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rollouts.base.terminal import say, visible
from rollouts.concurrency.boundary import Wait, waits
from rollouts.concurrency.deadlines import pauses
from rollouts.concurrency.wait_report import report, where_of_users
from rollouts.errors import shortened

__all__ = ["duration", "line_of_users", "reporting_on_signal", "waiting_lines"]


def waiting_lines(count: int = 2) -> list[str]:
    """At most ``count`` lines: global pauses, then the kinds of waits of this process with number and longest time."""
    innermost: dict[int, Wait] = {}
    for wait in waits():  # oldest first, so that an inner wait of a task replaces an outer one
        innermost[id(wait if wait.task is None else wait.task)] = wait
    kinds: dict[str, list[Wait]] = {}
    for wait in sorted(innermost.values(), key=lambda wait: wait.since):
        kinds.setdefault(wait.shown or wait.what, []).append(wait)
    lines = [str(pause) for pause in pauses()] + [_line(what, group) for what, group in kinds.items()]
    return [visible(line) for line in lines[:count]]


def _line(what: str, group: list[Wait]) -> str:
    """The waits of one kind, the oldest first."""
    oldest = group[0]
    seconds = f"{time.monotonic() - oldest.since:.1f} s"
    line = line_of_users(where_of_users(oldest))
    place = f", in {line}" if line else ""
    if len(group) == 1:
        return f"{oldest.place} waits for {what} {seconds}{place}"
    return f"{len(group)} wait for {what}, up to {seconds}{place}"


@contextlib.contextmanager
def reporting_on_signal(number: int = getattr(signal, "SIGUSR1", 0), file: TextIO | None = None) -> Iterator[None]:
    """Write a :func:`report` to standard error at each signal ``number``, also while the event loop is blocked."""
    if not number or threading.current_thread() is not threading.main_thread():  # no such signal, or none for threads
        yield
        return

    def write_report(_: int, frame: types.FrameType | None) -> None:
        try:
            text = report(frame)
        except Exception as error:  # noqa: BLE001 - it would be raised in an arbitrary line of the main thread
            text = f"rollouts: the report raised {shortened(error)}"
        with contextlib.suppress(Exception, SystemExit):  # the file is closed, or writing another line
            say(text, file=file or sys.stderr, flush=True)

    before = signal.signal(number, write_report)
    try:
        yield
    finally:
        signal.signal(number, before)


def line_of_users(line: str) -> str:
    """A source line with its file relative to the current folder, if it is below it."""
    folder = f"{Path.cwd()}/"
    return line.removeprefix(folder)


def duration(seconds: float) -> str:
    """A duration of at most two units, e.g. ``"3 min 20 s"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
