"""The HTTP server of the engine: the part of SGLang 0.5.23's protocol that rollouts need.

Invariant: the event loop never computes. Every wait ends: with a response, at a deadline, or when the client
disconnects, which aborts its requests.

The deliberate differences from SGLang are ``control.DIFFERENCES``, which ``/server_info`` reports and
``rollouts check-server`` prints.

Quirks of SGLang 0.5.23 that are reproduced:
- Aborting a known rid aborts every rid that begins with it.
- ``/health`` blocks while paused and then fails.
- Cached prefixes survive weight updates and pauses until a flush. A flush fails while a request has K/V in a slot.
- An update that cannot flush reports ``success: false``, but changes the weights and the version of the tokens, not
  the folder and version in ``/model_info``.
- A prompt needs 6 tokens of the context for itself, and a reply ends 2 tokens before its end.
- An adapter is unloaded when its last request has ended; meanwhile no other adapter is loaded or unloaded.
- Idle connections are closed after 5 seconds.
- A reply whose last allowed token is a stop token ends by length.
- ``ignore_eos`` also disables ``stop_token_ids``.
- Errors of a stream have status 200.

This module does not know tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rollouts.engine.answers import Answers
from rollouts.engine.control import control_routes
from rollouts.engine.frontend import Faults, Frontend
from rollouts.engine.loading import load_folder
from rollouts.engine.protocol import GenerateBody, Refusal, decoded, read_generate
from rollouts.engine.requests import Request
from rollouts.errors import ConfigError
from rollouts.http.access import guard
from rollouts.http.server_log import server_log

__all__ = ["Options", "running_server"]

REQUEST_SECONDS = 3600.0
"""Deadline of a call of ``/generate``, including queued and paused time."""
STOP_SECONDS = 5.0


@attrs.frozen
class Options:
    """Options as documented in :func:`rollouts.engine.running_server`."""

    slots: int
    max_context: int | None
    max_queued: int | None
    health_seconds: float
    dtype: str
    keep_alive_seconds: float
    faults: Faults
    api_key: str | None = attrs.field(default=None, repr=False)


@contextlib.asynccontextmanager
async def running_server(model: Path, host: str, port: int, options: Options) -> AsyncIterator[str]:
    """Serve a model folder while the context lasts; yields the base URL."""
    guarded = guard(host, options.api_key)
    loaded = await anyio.to_thread.run_sync(load_folder, model, options.max_context, options.dtype)
    frontend = Frontend(
        loaded,
        options.slots,
        max_queued=options.max_queued,
        health_seconds=options.health_seconds,
        faults=options.faults,
    )
    app = web.Application(client_max_size=2**30, middlewares=[guarded, _refusals])
    app.add_routes([web.post("/generate", _Generate(frontend).handle), *control_routes(frontend)])
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=server_log(),
        shutdown_timeout=STOP_SECONDS / 2,
        keepalive_timeout=options.keep_alive_seconds,
    )
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=4096).start()
        except OSError as error:
            raise ConfigError(f"port: got {host}:{port}; expected an address to listen on; {error}") from error
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        with anyio.move_on_after(STOP_SECONDS, shield=True):
            await frontend.stop()
            await runner.cleanup()


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return web.Response(
            body=msgspec.json.encode(refusal.body), status=refusal.status, content_type="application/json"
        )


class _Generate:
    """``POST /generate``"""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def handle(self, http: web.Request) -> web.StreamResponse:
        body = decoded(await http.read(), GenerateBody)
        updates = _Updates()
        try:
            answers = await self._read(body, updates)
            self._frontend.enter(answers.requests)
        except Refusal as refusal:
            if not body.stream:
                raise
            return await _sse(http, _refused(refusal))
        try:
            with anyio.fail_after(REQUEST_SECONDS):
                if body.stream:
                    return await _sse(http, _chunks(answers, updates))
                while not all(request.finish for request in answers.requests):
                    await updates.next()
        except TimeoutError as error:
            raise Refusal.failed(f"no answer after {REQUEST_SECONDS:g} s", 503) from error
        finally:
            self._frontend.leave(answers.requests)
        return _response(answers)

    async def _read(self, body: GenerateBody, updates: _Updates) -> Answers:
        if body.text is None and not body.image_data:
            return read_generate(body, self._frontend.loaded, updates, self._frontend.adapters)
        frontend = self._frontend
        return await anyio.to_thread.run_sync(read_generate, body, frontend.loaded, updates, dict(frontend.adapters))


class _Updates:
    """Callback for updated requests, and the event that wakes their call."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def __call__(self, request: Request) -> None:
        self._event.set()

    async def next(self) -> None:
        """Wait for an update since the last call."""
        await self._event.wait()
        self._event = anyio.Event()


def _response(answers: Answers) -> web.Response:
    for request in answers.requests:
        status = request.finish and request.finish.get("status_code")
        if request.finish and status:
            raise Refusal.failed(request.finish["message"], status)
    objects = [answers.of(index) for index in range(len(answers.requests))]
    return web.Response(
        body=msgspec.json.encode(objects[0] if answers.single else objects), content_type="application/json"
    )


# -- streams ----------------------------------------------------------------------------------------------------------


async def _sse(http: web.Request, events: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    async for event in events:
        await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _chunks(answers: Answers, updates: _Updates) -> AsyncIterator[dict[str, Any]]:
    """Yield the cumulative output of each updated request; in a batch, ``index`` is the index of its request."""
    sent = dict.fromkeys(range(len(answers.requests)), -1)
    while sent:
        await updates.next()
        for index in list(sent):
            answer = answers.of(index)
            count = len(answer["output_ids"])
            ended = answer["meta_info"]["finish_reason"] is not None
            if count == sent[index] and not ended:
                continue
            yield answer if answers.single else {**answer, "index": index}
            sent[index] = count
            if ended:
                del sent[index]


async def _refused(refusal: Refusal) -> AsyncIterator[dict[str, Any]]:
    message = str(refusal)
    if refusal.status == 400:
        yield {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}
    else:
        reason = {"type": "abort", "message": message, "status_code": refusal.status, "err_type": None}
        yield {"text": "", "output_ids": [], "meta_info": {"finish_reason": reason, "completion_tokens": 0}}
