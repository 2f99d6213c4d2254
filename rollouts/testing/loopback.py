"""How the servers for tests are served: on a free port of the loopback address, in the event loop of the test."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import ClassVar, Self

import anyio
from aiohttp import web

__all__ = ["LoopbackServer", "on_loopback", "url_of"]


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


class LoopbackServer(abc.ABC):
    """Serves all routes with one function while its context lasts.

    Attributes:
        url: the server's URL, with ``BASE`` behind it.
    """

    BASE: ClassVar[str] = ""
    url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._serving = on_loopback(app)
        self.url = url_of(await self._serving.__aenter__()) + self.BASE
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._serving.__aexit__(kind, error, trace)

    @abc.abstractmethod
    async def _handle(self, request: web.Request) -> web.StreamResponse: ...
