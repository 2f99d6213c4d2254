"""Settings of Python's garbage collector and of the heap that avoid long pauses and idle memory in a run.

Invariant: inside :func:`calm_collector` a full collection skips the objects that existed before (tokenizer, template,
torch: some hundred thousand), and, unless a trainer works in the same process, the objects of any full collection that
took long: those of many thousand rollouts in flight. Afterwards the collector's settings are as before. Objects without
reference cycles are freed at once, as usual, and a rollout leaves no cycle, whether it ends or is cancelled; only
cycles of user code wait for the collector, and cycles among skipped objects until the context ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["calm_collector", "free"]

_THRESHOLDS = (5_000, 10, 2)
"""Thresholds of the three generations. A collection takes 2 µs an object if all are garbage (e.g. the tracebacks of an
unreachable server): 5,000 of them block the event loop for 10 ms. A full one visits what 150,000 allocations left."""

_LONG_SECONDS, _OF_MANY_OBJECTS = 0.05, (5_000, 5, 1)
"""The objects that remain after a full collection of this length are skipped from then on. With the thresholds from
then on, a full one visits a third as many objects, and a third of the length is long."""

_YOUNG_SECONDS = 0.5
"""From then on, young objects are collected this often: the collector counts allocations less deallocations, so old
objects that are freed hide new ones, and its next collection would visit all of these at once."""

_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 2**20
"""Blocks from this size are mapped alone. Unless it is set, glibc raises it to the size of each that is freed, up to
32 MB (mallopt(3)), and later ones leave gaps among small objects: 20 to 30 % of the memory of a long run."""

_FROZEN_BY_PYTHON = 5_000
"""More frozen objects than the interpreter has at its start (Python 3.12 freezes some 400, other versions none)."""


@contextlib.contextmanager
def calm_collector(*, shared: bool = False) -> Iterator[None]:
    """Collect once, freeze all existing objects and raise the thresholds; for a long run of one process.

    Args:
        shared: whether other work of the process, such as a trainer, creates objects meanwhile: its cycles, which may
            hold tensors, are then freed also after a long collection, and long collections are repeated.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if not (shared or "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in tunables):
        _call_glibc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BLOCK)
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON or not gc.isenabled():  # the user has set the collector already
        yield
        return
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    began, long = 0.0, _LONG_SECONDS

    def freeze_after_a_long_one(phase: str, info: dict[str, int]) -> None:
        nonlocal began, long
        if info["generation"] == 2 and phase == "start":
            began = time.thread_time()  # of the thread that collects: on a busy machine, the wall clock is longer
        elif info["generation"] == 2 and not shared and time.thread_time() - began > long:
            gc.freeze()
            gc.set_threshold(*_OF_MANY_OBJECTS)
            long = _LONG_SECONDS / 3

    timer: asyncio.TimerHandle | None = None

    def collect_young(loop: asyncio.AbstractEventLoop) -> None:
        nonlocal timer
        if long < _LONG_SECONDS:
            gc.collect(1)
        timer = loop.call_later(_YOUNG_SECONDS, collect_young, loop)

    gc.callbacks.append(freeze_after_a_long_one)
    with contextlib.suppress(RuntimeError):  # without an event loop there is none that a pause stops
        collect_young(asyncio.get_running_loop())
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        gc.callbacks.remove(freeze_after_a_long_one)
        gc.set_threshold(*before)
        gc.unfreeze()


def free(values: list[Any]) -> None:
    """Free the values of a list one by one, so that other threads run meanwhile; glibc returns their pages."""
    while values:
        values.pop()
    _call_glibc("malloc_trim", 0)  # 0.1 s a GB, without the interpreter's lock


def _call_glibc(name: str, *arguments: int) -> None:
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        getattr(ctypes.CDLL(None), name)(*arguments)
