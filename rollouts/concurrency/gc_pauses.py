"""Python's garbage collector, kept from stopping the event loop of a run.

Invariant: inside :func:`calm_collector` a full collection does not walk what was there before (a tokenizer, a template,
torch: some hundred thousand objects), and comes rarely; afterwards everything is as it was. What a run drops is freed
by reference counts at once, as ever; only what refers to itself waits.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["calm_collector"]

_THRESHOLDS = (5_000, 40, 10)
"""New objects before the youngest are looked through; how many such looks before the next age, and the next. A look
lasts 2 µs an object where all are garbage (the tracebacks of a server that is away): 10 ms of a loop that stands still.
"""


@contextlib.contextmanager
def calm_collector() -> Iterator[None]:
    """For a long run of one process: on entering, clean up once and set aside what is there."""
    if gc.get_freeze_count() or not gc.isenabled():  # somebody has thought of it
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
