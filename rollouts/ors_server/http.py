"""What an ORS server says over HTTP: JSON, refusals, and the events of a call that runs whether or not anybody listens.

Invariant: a call's result is kept in its :class:`Run` until it is asked for again; what a client could mistake for a
part of the format is not sent. It knows no environment.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import attrs
import msgspec
from aiohttp import web

from rollouts.errors import RolloutsError

__all__ = [
    "Refused",
    "Run",
    "body_of",
    "ending_of",
    "event",
    "json_answer",
    "number_of",
    "run_to_end",
    "send_events",
    "stream_of",
    "telling_refusals",
]

_CHUNK = 4096


@attrs.define(eq=False)
class Run:
    """A call under way, or its result."""

    done: anyio.Event = attrs.field(factory=anyio.Event)
    text: str = ""
    error: str | None = None
    ended: float | None = None


async def run_to_end(run: Run, work: Callable[[], Awaitable[str]]) -> None:
    """Do the work of a call, and keep what came of it."""
    try:
        run.text = await work()
    except RolloutsError as error:
        run.error = " ".join(str(error).split()) or type(error).__name__
    finally:
        run.ended = time.monotonic()
        run.done.set()


class Refused(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


@web.middleware
async def telling_refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    """Says a :class:`Refused` that a handler raised."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Refused as refused:
        return json_answer({"detail": refused.detail}, refused.status, refused.headers)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A value as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def body_of(request: web.Request) -> dict[str, Any]:
    """The object that a request carries.

    Raises:
        Refused: it carries none.
    """
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refused(422, "the body is no JSON object")
    return body


def number_of(request: web.Request) -> str:
    """The session that a request is of.

    Raises:
        Refused: it names none.
    """
    number = request.headers.get("X-Session-ID", "").strip()
    if not number:
        raise Refused(400, "X-Session-ID header is required")
    return number


async def stream_of(request: web.Request) -> web.StreamResponse:
    """The beginning of a stream of events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def send_events(request: web.Request, events: list[tuple[str, str]]) -> web.StreamResponse:
    """A stream of these events, as name and data."""
    response = await stream_of(request)
    await response.write(b"".join(event(name, data) for name, data in events))
    return response


def event(name: str, data: str) -> bytes:
    """One event in bytes."""
    return f"event: {name}\r\ndata: {data}\r\n\r\n".encode()


def ending_of(run: Run) -> list[bytes]:
    """The result in pieces. None begins with a space, which some clients take for part of the format."""
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
