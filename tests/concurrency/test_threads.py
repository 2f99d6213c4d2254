"""What the package relies on in anyio's worker threads; ``scripts/test --oldest`` asks the oldest anyio that is allowed."""

from __future__ import annotations

import functools
import weakref

import anyio
import anyio.lowlevel


class Batch:
    """As the samples of a batch, which a thread writes."""


async def test_an_idle_thread_keeps_nothing_of_its_last_call() -> None:
    """Else the memory of a written batch stays in use until the thread gets another call."""
    batch = Batch()
    await anyio.to_thread.run_sync(functools.partial(id, batch))
    kept = weakref.ref(batch)
    del batch
    with anyio.fail_after(5):
        while kept() is not None:  # the thread answers before its call has ended
            await anyio.lowlevel.checkpoint()
