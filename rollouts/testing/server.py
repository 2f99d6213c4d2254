"""A loopback stub of an SGLang server, with scripted replies and faults.

Invariant: it responds to every request by its script and fault, and records the request, so that a test can compare
sent and stored tokens. A generation ends with its response or an abort, not when its connection breaks, as on a real
engine. No model runs here; see the embedded engine for one. Needs the extra ``serve``.
"""

from __future__ import annotations

import socket
import struct
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, get_args

import anyio
import msgspec
from aiohttp import web

from rollouts.errors import ConfigError
from rollouts.testing.loopback import on_loopback, url_of
from rollouts.testing.replies import ERRORS, Answer, Fault, Request, Script, probe_body, reply_body

__all__ = ["Answer", "Fault", "Request", "StubServer"]


class StubServer:
    """Serves while its context lasts.

    Args:
        reply: the script; ids beyond ``max_new_tokens`` are cut.
        faults: the fault of each ``/generate`` in order; ``"none"`` when they are used up.
        latency: called with the request and awaited before each response; an abort cancels it.
        model_info: body of ``/model_info`` and ``/server_info``, read at each request; replies have its
            ``weight_version``. ``None`` for a server that is not SGLang.
        max_context: context length in ``/v1/models``, in tokens.
        old_routes: only ``/get_model_info`` and ``/get_server_info``, as before 0.5.9.
        workers: act as a router: no ``/abort_request``, and ``/workers`` lists these URLs.
        loads: further fields of the one rank in ``/v1/loads``; ``None`` for a server without this route.
        closes_idle: reset a connection at its second request, as a server that closes idle connections.
        original_logprobs: report logprobs before the temperature to the probe for them.
        port: port to listen on; 0 for a free one.

    Attributes:
        url: the server's URL.
        requests: every received ``/generate`` request but probes of logprobs, in order.
        asked: the paths of all other requests, in order.
        aborted: the rids of all aborts, in order.
        live: rids of the generations in progress.
        most_live: most generations in progress at once.
        connections: number of connections used by ``/generate``.
    """

    def __init__(
        self,
        reply: Script | None = None,
        *,
        faults: Iterable[Fault | Answer] = (),
        latency: Callable[[Request], Awaitable[None]] | None = None,
        model_info: Mapping[str, Any] | None = {"model_path": "stub", "weight_version": "v1"},
        max_context: int = 1_000_000,
        old_routes: bool = False,
        workers: Sequence[str] | None = None,
        loads: Callable[[], Mapping[str, float]] | None = None,
        closes_idle: bool = False,
        original_logprobs: bool = False,
        port: int = 0,
    ) -> None:
        self._reply: Script = reply or (lambda input_ids, params: [1, 2, 3])
        for fault in faults if isinstance(faults, Sequence) else ():
            if not isinstance(fault, Answer) and fault not in get_args(Fault):
                raise ConfigError.of("StubServer.faults", fault, f"one of {get_args(Fault)}")
        self._faults: Iterator[Fault | Answer] = iter(faults)
        self._latency = latency
        self._model_info = model_info
        self._max_context = max_context
        self._old_routes = old_routes
        self._workers = workers
        self._loads = loads
        self._closes_idle = closes_idle
        self.original_logprobs = original_logprobs
        self._port = port
        self._generations: dict[str, anyio.CancelScope] = {}
        self._transports: set[Any] = set()  # strong references, so that no identity is reused
        self.requests: list[Request] = []
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.most_live = 0
        self.url = ""

    def __repr__(self) -> str:
        return f"<StubServer {self.url}: {len(self.requests)} requests, {len(self.aborted)} aborted>"

    @property
    def live(self) -> set[str]:
        return set(self._generations)

    @property
    def connections(self) -> int:
        return len(self._transports)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        if self._workers is None:
            app.router.add_post("/abort_request", self._abort)
        else:
            app.router.add_get("/workers", self._list_workers)
        if self._model_info is not None:
            for prefix in ("/get_",) if self._old_routes else ("/get_", "/"):
                app.router.add_get(f"{prefix}model_info", self._info)
                app.router.add_get(f"{prefix}server_info", self._info)
            app.router.add_get("/v1/models", self._models)
        if self._loads is not None:
            app.router.add_get("/v1/loads", self._list_loads)
        self._serving = on_loopback(app, self._port)
        self._runner = await self._serving.__aenter__()
        self.url = url_of(self._runner)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(*self._generations)
        await self._serving.__aexit__(kind, error, trace)

    # -- routes --

    async def _health(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return _json({"version": "0.5.23", **(self._model_info or {})})

    async def _models(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return _json({"data": [{"id": "stub", "max_model_len": self._max_context}]})

    async def _list_loads(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        load = {"dp_rank": 0, "num_running_reqs": len(self._generations), "num_waiting_reqs": 0, "token_usage": 0.0}
        return _json({"version": "0.5.23", "loads": [{**load, **(self._loads() if self._loads else {})}]})

    async def _list_workers(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return _json({"workers": [{"id": url, "url": url} for url in self._workers or ()]})

    async def _abort(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        rid = body.get("rid")
        self.aborted.append(rid)
        if body.get("abort_all"):
            self._end(*self._generations)
        elif rid in self._generations:  # also aborts every rid that starts with this one, as a real server does
            self._end(*[live for live in self._generations if live.startswith(rid)])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self._closes_idle and request.transport in self._transports:
            return _cut(request)
        self._transports.add(request.transport)
        body = msgspec.json.decode(await request.read())
        if body.get("top_logprobs_num"):
            self.asked.append("the probe of logprobs")
            return _json(probe_body(body, original_logprobs=self.original_logprobs))
        arrived = Request(
            rid=body.get("rid") or uuid.uuid4().hex,
            input_ids=body.get("input_ids") or [],
            sampling_params=body.get("sampling_params", {}),
            headers=dict(request.headers),
            body=body,
        )
        self.requests.append(arrived)
        if arrived.rid in self._generations:
            return _json({"error": {"message": f"Duplicate request ID detected: {arrived.rid}"}}, 400)
        fault: Fault | Answer = next(self._faults, "none")
        self._generations[arrived.rid] = anyio.CancelScope()
        self.most_live = max(self.most_live, len(self._generations))
        with self._generations[arrived.rid] as generation:
            if self._latency is not None:
                await self._latency(arrived)
            if fault == "hang":
                await anyio.sleep_forever()
        if generation.cancel_called:
            fault = "abort"
        return await self._answer(request, arrived, fault)

    def _end(self, *rids: str) -> None:
        for rid in rids:
            self._generations.pop(rid).cancel()

    # -- answers --

    async def _answer(self, request: web.Request, arrived: Request, fault: Fault | Answer) -> web.StreamResponse:
        if fault == "reset":
            return _cut(request)
        version = str((self._model_info or {}).get("weight_version", "v1"))
        body = ERRORS[fault][1] if fault in ERRORS else reply_body(self._reply, arrived, fault, version=version)
        payload = msgspec.json.encode(body)
        if fault == "reset_in_body":
            return await _stream(request, payload, [payload[: len(payload) // 2]])
        if fault not in ("error_500", "error_duplicate"):
            self._generations.pop(arrived.rid, None)
        if isinstance(fault, Answer):
            return web.Response(body=fault.body, status=fault.status)
        if fault == "not_http":
            assert request.transport is not None
            request.transport.write(b"\x00\x01 no HTTP \r\n\r\n")
            return _cut(request, gently=True)
        if fault == "not_json":
            return web.Response(text="<html>Welcome</html>", content_type="text/html")
        if fault == "drip":
            return await _stream(request, payload, [payload[n : n + 1] for n in range(len(payload))])
        response = web.Response(body=payload, content_type="application/json")
        if fault in ERRORS:
            response.set_status(ERRORS[fault][0])
        if fault == "close_after":
            await response.prepare(request)
            await response.write_eof()
            return _cut(request, gently=True)
        return response


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def _stream(request: web.Request, whole: bytes, parts: Sequence[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(whole)), "Content-Type": "application/json"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response if sum(map(len, parts)) == len(whole) else _cut(request)


def _cut(request: web.Request, *, gently: bool = False) -> web.Response:
    """Close the connection: by a reset, or gently, after sending what was written."""
    transport = request.transport
    if transport is not None and gently:
        transport.close()
    elif transport is not None:
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()
    return web.Response()
