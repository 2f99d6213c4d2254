"""The HTTP face of the engine: the part of SGLang 0.5.23's protocol that rollouts need.

Invariant: the event loop never computes; it reads, hands over and waits, and every wait ends: by an answer, by a
deadline, or by the client's disconnect, which aborts its requests.

Deliberate differences from SGLang: an id outside the vocabulary is a 400 and not the end of the server;
``sampling_seed`` is always honoured (of ``n`` copies, copy k has seed + k); a health probe of an idle engine answers at
once. SGLang's race of a weight update that waits for requests and then fails to flush, since the last of them is still
there, happens where ``Options.unflushed_updates`` asks for it, and then always.

Quirks that are kept: aborting a known rid aborts every rid that begins with it; ``/health`` blocks while paused and
then fails; cached prefixes outlive the weights that computed them until the cache is flushed, also through a pause; a
flush is refused while a request holds its K/V; an update that cannot flush changes the weights and the version of the
tokens, says ``success: false``, and leaves the folder and the version that ``/model_info`` names; a reply that fills
its budget with a stop token ends by length; ``ignore_eos`` disables ``stop_token_ids`` too; errors of a stream come
with status 200.

This module knows no tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import msgspec
from aiohttp import web

from rollouts.engine.answers import Answers
from rollouts.engine.control import control_routes
from rollouts.engine.frontend import Frontend
from rollouts.engine.loading import load_folder
from rollouts.engine.protocol import GenerateBody, Refusal, decoded, read_generate
from rollouts.engine.requests import Request
from rollouts.errors import ConfigError

__all__ = ["Options", "running_server"]

REQUEST_SECONDS = 3600.0
"""No call of ``/generate`` takes longer, queued and paused time included."""
STOP_SECONDS = 5.0


@attrs.frozen
class Options:
    """What :func:`rollouts.engine.running_server` documents."""

    slots: int
    max_context: int | None
    max_queued: int | None
    health_seconds: float
    dtype: str
    unflushed_updates: bool = False


@contextlib.asynccontextmanager
async def running_server(model: Path, host: str, port: int, options: Options) -> AsyncIterator[str]:
    """Serve a model folder while the context lasts; gives the base URL."""
    loaded = await anyio.to_thread.run_sync(load_folder, model, options.max_context, options.dtype)
    frontend = Frontend(
        loaded,
        options.slots,
        max_queued=options.max_queued,
        health_seconds=options.health_seconds,
        unflushed_updates=options.unflushed_updates,
    )
    app = web.Application(client_max_size=2**30, middlewares=[_refusals])
    app.add_routes([web.post("/generate", _Generate(frontend).handle), *control_routes(frontend)])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_SECONDS / 2)
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
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
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
        news = _News()
        try:
            answers = await self._read(body, news)
            self._frontend.enter(answers.requests)
        except Refusal as refusal:
            if not body.stream:
                raise
            return await _sse(http, _refused(refusal))
        try:
            with anyio.fail_after(REQUEST_SECONDS):
                if body.stream:
                    return await _sse(http, _chunks(answers, news))
                while not all(request.finish for request in answers.requests):
                    await news.next()
        except TimeoutError as error:
            raise Refusal.given_up(f"no answer after {REQUEST_SECONDS:g} s", 503) from error
        finally:
            self._frontend.leave(answers.requests)
        return _answered(answers)

    async def _read(self, body: GenerateBody, news: _News) -> Answers:
        if body.text is None:
            return read_generate(body, self._frontend.loaded, news)
        return await anyio.to_thread.run_sync(read_generate, body, self._frontend.loaded, news)


class _News:
    """Wakes the call that waits for its requests."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def __call__(self, request: Request) -> None:
        self._event.set()

    async def next(self) -> None:
        """Wait until there was news since the last time."""
        await self._event.wait()
        self._event = anyio.Event()


def _answered(answers: Answers) -> web.Response:
    for request in answers.requests:
        status = request.finish and request.finish.get("status_code")
        if request.finish and status:
            raise Refusal.given_up(request.finish["message"], status)
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


async def _chunks(answers: Answers, news: _News) -> AsyncIterator[dict[str, Any]]:
    """Each chunk holds everything so far; in a batch, ``index`` says of which prompt."""
    sent = dict.fromkeys(range(len(answers.requests)), -1)
    while sent:
        await news.next()
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
