"""Ctrl-C in the commands, from the first import to the end.

Invariant: the first signal asks for a clean stop, or ends a command whose work has not begun; the second ends the
process at once. The handlers are Python functions: they also run while the event loop is blocked, and an exception
handler in foreign code cannot swallow them. It imports the standard library only: it is active before anything else is
imported.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

__all__ = ["INTERRUPTED", "exit_on_interrupt", "handling_interrupts", "waking"]

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def exit_on_interrupt() -> None:
    """End the process at the first Ctrl-C, while there is nothing to clean up, and after the command has ended.

    At the very end the interpreter restores the default action, with which a signal would replace the exit code.
    """
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the first callback is called last
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


def raise_interrupt() -> None:
    """Raise the exception that Python raises at Ctrl-C."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def handling_interrupts(
    first: Callable[[], object] = raise_interrupt,
    second: Callable[[], object] | None = None,
    signals: Sequence[signal.Signals] = (signal.SIGINT,),
) -> Iterator[None]:
    """Call ``first`` at the first of some signals; at the next one call ``second`` and end the process.

    Both are called in the main thread, between any two steps of its program. Outside the main thread this does nothing,
    as Python allows no handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal received
        received += 1
        if received == 1:
            first()
            return
        if second is not None:
            second()
        os._exit(INTERRUPTED)

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def waking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Wake an event loop at each signal: a signal just before the loop waits does not interrupt the wait.

    A loop that wakes itself, such as uvloop's, is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    import socket  # here: rollouts --help has no event loop

    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            yield
            return
        loop.add_reader(reading, reading.recv, 4096)
        try:
            yield
        finally:
            loop.remove_reader(reading)
            signal.set_wakeup_fd(-1)
