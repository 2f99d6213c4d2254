"""A loopback HTTP server with scripted JSON responses, for tests of rewards and judges behind HTTP.

Invariant: it records every request before it responds. It knows only HTTP with JSON.
Needs the extra ``serve``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio
import attrs
import msgspec
from aiohttp import web

from rollouts.testing.loopback import LoopbackServer

__all__ = ["Asked", "JsonServer"]


@attrs.frozen
class Asked:
    """One received request."""

    path: str
    body: Any
    headers: Mapping[str, str]
    port: int = 0
    """The client's port; requests over one connection have the same."""


class JsonServer(LoopbackServer):
    """Serves while its context lasts.

    Args:
        answer: returns the value to send for a request with status 200, or ``(status, value)``; bytes are sent as they
            are; ``None`` leaves the request open.

    Attributes:
        url: the server's URL.
        asked: every request, in order.
    """

    def __init__(self, answer: Callable[[Asked], Any]) -> None:
        self._answer = answer
        self.asked: list[Asked] = []

    def __repr__(self) -> str:
        return f"<JsonServer {self.url}: {len(self.asked)} requests>"

    async def _handle(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read() or b"null")
        peer = None if request.transport is None else request.transport.get_extra_info("peername")
        received = Asked(request.path, body, dict(request.headers), peer[1] if peer else 0)
        self.asked.append(received)
        answer = self._answer(received)
        if answer is None:
            await anyio.sleep_forever()
        status, value = answer if isinstance(answer, tuple) else (200, answer)
        payload = value if isinstance(value, bytes) else msgspec.json.encode(value)
        return web.Response(status=status, body=payload, content_type="application/json")
