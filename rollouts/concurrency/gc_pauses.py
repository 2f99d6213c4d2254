"""Settings of Python's garbage collector that avoid long pauses of a run's event loop.

Invariant: inside :func:`calm_collector` a full collection skips the objects that existed before (tokenizer, template,
torch: some hundred thousand) and is rare; afterwards the settings are as before. Objects without reference cycles are
freed at once, as usual; only cycles wait for the collector.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["calm_collector"]

_THRESHOLDS = (5_000, 40, 10)
"""Thresholds of the three generations. A collection takes 2 µs an object if all are garbage (e.g. the tracebacks of an
unreachable server): 5,000 of them block the event loop for 10 ms."""

_FROZEN_BY_PYTHON = 5_000
"""More frozen objects than the interpreter has at its start (Python 3.12 freezes some 400, other versions none)."""


@contextlib.contextmanager
def calm_collector() -> Iterator[None]:
    """Collect once, freeze all existing objects and raise the thresholds; for a long run of one process."""
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON or not gc.isenabled():  # the user has set the collector already
        yield
        return
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
