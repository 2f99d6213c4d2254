"""A server of aiohttp on loopback, for the fakes of services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

__all__ = ["served"]


@asynccontextmanager
async def served(routes: web.RouteTableDef) -> AsyncIterator[str]:
    """Serve these routes; yields the URL. Any other request is answered with 404."""
    application = web.Application(client_max_size=1 << 30)
    application.add_routes(routes)
    runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()
