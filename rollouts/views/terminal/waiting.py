"""The waits of rollouts, in words: for the model, a tool, a reward, a pause.

Invariant: each task counts once, by the innermost code that it waits for; the longest wait comes first. A source line
is named only where it is a user's.
"""

from __future__ import annotations

import time
from pathlib import Path

from rollouts.base.terminal import visible
from rollouts.concurrency.boundary import Wait, waits
from rollouts.concurrency.deadlines import pauses
from rollouts.concurrency.wait_report import where_of_users

__all__ = ["duration", "line_of_users", "waiting_lines"]


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
