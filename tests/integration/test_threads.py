"""A guarantee of anyio's worker threads, on which runs rely. ``scripts/test --oldest`` tests the oldest anyio."""

from __future__ import annotations

import functools
import weakref

import anyio
import anyio.lowlevel


class Batch:
    """In place of the samples of a batch."""


async def test_an_idle_thread_keeps_nothing_of_its_last_call() -> None:
    """Else the memory of a written batch stays in use until the thread gets another call."""
    batch = Batch()
    await anyio.to_thread.run_sync(functools.partial(id, batch))
    kept = weakref.ref(batch)
    del batch
    with anyio.fail_after(5):
        while kept() is not None:  # the thread answers before its call has ended
            await anyio.lowlevel.checkpoint()
