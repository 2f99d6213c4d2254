"""The event loop on which all rollouts of a trainer run.

Invariant: a process has one, from the first call until Python exits. It is the trainer's own where slime or miles is
installed: their functions keep clients that work in one loop only (slime 0.3.1, rollout/rm_hub/__init__.py:
_get_shared_session), and a launch may call them as well as ours.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import threading
from concurrent.futures import Future

from anyio.from_thread import BlockingPortal

from rollouts.integrations.slime.records import family, records

__all__ = ["event_loop"]


def event_loop() -> BlockingPortal:
    """A portal to the loop, for calls from the trainer's thread."""
    return _portal(family().package if records().is_slime else None)


@functools.cache
def _portal(package: str | None) -> BlockingPortal:
    if package is None:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="rollouts", daemon=True).start()
    else:
        loop = importlib.import_module(f"{package}.utils.async_utils").get_async_loop().loop
    opened: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            opened.set_result(portal)
            await portal.sleep_until_stopped()

    asyncio.run_coroutine_threadsafe(serve(), loop)
    return opened.result()
