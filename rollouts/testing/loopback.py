"""How the servers for tests are served: on a free port of the loopback address, in the event loop of the test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio
from aiohttp import web

__all__ = ["on_loopback", "url_of"]


@contextlib.asynccontextmanager
async def on_loopback(app: web.Application, port: int = 0) -> AsyncIterator[web.AppRunner]:
    """Serve an application while the context lasts; yields its runner. A client that leaves cancels its request."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        yield runner
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


def url_of(runner: web.AppRunner) -> str:
    """Where it listens."""
    return f"http://127.0.0.1:{runner.addresses[0][1]}"
