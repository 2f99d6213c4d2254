"""HTTP of the ORS server: JSON, error responses, and the events of a call.

Invariant: a call continues when its client disconnects; its result stays in its :class:`Run`. No event contains bytes
that a client could parse as part of the format. This module knows no environment.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import attrs
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rollouts.errors import RolloutsError

__all__ = [
    "Refused",
    "Run",
    "body_of",
    "ending_of",
    "event",
    "json_answer",
    "refusals_as_json",
    "run_to_end",
    "send_events",
    "session_id_of",
    "stream_of",
]

_CHUNK = 4096


@attrs.define(eq=False)
class Run:
    """A running call, or its result."""

    done: anyio.Event = attrs.field(factory=anyio.Event)
    text: str = ""
    error: str | None = None
    ended: float | None = None


async def run_to_end(run: Run, work: Callable[[], Awaitable[str]]) -> None:
    """Run a call and store its result or error."""
    try:
        run.text = await work()
    except RolloutsError as error:
        run.error = " ".join(str(error).split()) or type(error).__name__
    finally:
        run.ended = time.monotonic()
        run.done.set()


class Refused(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


@web.middleware
async def refusals_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: send a :class:`Refused` that a handler raised as JSON."""
    try:
        return await handler(request)
    except Refused as refused:
        return json_answer({"detail": refused.detail}, refused.status, refused.headers)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON response."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def body_of(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        Refused: the body is not a JSON object.
    """
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refused(422, "the body is not a JSON object")
    return body


def session_id_of(request: web.Request) -> str:
    """The session id of a request.

    Raises:
        Refused: the header is missing.
    """
    session_id = request.headers.get("X-Session-ID", "").strip()
    if not session_id:
        raise Refused(400, "X-Session-ID header is required")
    return session_id


async def stream_of(request: web.Request) -> web.StreamResponse:
    """Start a response that streams events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def send_events(request: web.Request, events: list[tuple[str, str]]) -> web.StreamResponse:
    """Respond with a stream of these events, given as (name, data)."""
    response = await stream_of(request)
    await response.write(b"".join(event(name, data) for name, data in events))
    return response


def event(name: str, data: str) -> bytes:
    """Encode one event."""
    return f"event: {name}\r\ndata: {data}\r\n\r\n".encode()


def ending_of(run: Run) -> list[bytes]:
    """The result as events. No piece begins with whitespace, which some clients strip as part of the format."""
    if run.error is not None:
        return [event("error", run.error)]
    pieces, start = [], 0
    while start < len(run.text):
        end = start + _CHUNK
        while end < len(run.text) and run.text[end].isspace():
            end += 1
        pieces.append(run.text[start:end])
        start = end
    return [event("chunk", piece) for piece in pieces[:-1]] + [event("end", pieces[-1])]
