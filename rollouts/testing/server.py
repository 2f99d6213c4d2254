"""A loopback server that speaks enough of SGLang to be told what to say, and how to misbehave.

Invariant: it answers every request as its script and its fault say, and records what arrived, so that a test can
compare what was sent with what was stored. No model runs here; the embedded engine is the one that samples.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import anyio
import attrs
import msgspec
from aiohttp import web

__all__ = ["Fault", "Request", "StubServer"]

Script: TypeAlias = Callable[[list[int], dict[str, Any]], Sequence[int] | Mapping[str, Any]]
"""``(input_ids, sampling_params)`` to the ids of a reply, or to a whole answer's body."""

Fault: TypeAlias = Literal[
    "none",  # answer as scripted
    "reset",  # close without a word
    "reset_in_body",  # close half way through the answer
    "hang",  # never answer, until aborted
    "drip",  # answer byte by byte
    "close_after",  # answer, then close the connection without saying so
    "error_500",  # {"error": {"message"}}
    "error_503",  # {"object": "error", "message"}
    "error_string",  # 400 {"error": "…"}
    "error_type",  # 400 {"object": "error", "message", "type"}
    "error_context",  # 400, longer than the context
    "error_in_200",  # 200 {"error": {"message"}}
    "not_json",  # 200 with HTML
    "wrong_ids",  # output_ids and logprobs that contradict each other
    "wrong_count",  # prompt_tokens that is not what was sent
    "nan",  # a token without a logprob
    "no_logprobs",  # a server that ignores return_logprob
    "old",  # only the fields that every version has
    "abort",  # the answer to somebody else's abort: half the reply
]


@attrs.frozen
class Request:
    """One call of ``/generate`` as it arrived."""

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class StubServer:
    """Serves while its context lasts.

    Args:
        reply: what to say; a reply longer than ``max_new_tokens`` is cut there.
        faults: how each ``/generate`` in turn misbehaves; ``"none"`` when they are used up.
        latency: seconds before each answer, given the request.
        model_info: what ``/model_info`` answers; ``None`` for a server that is not SGLang.
        max_context: what ``/v1/models`` says.

    Attributes:
        url: where it listens.
        requests: every ``/generate`` that arrived, in order.
        aborted: the rids that were aborted, in order.
        live: rids being answered now.
        most_live: how many were answered at once, at most.
        connections: how many connections were opened.
    """

    def __init__(
        self,
        reply: Script | None = None,
        *,
        faults: Iterable[Fault] = (),
        latency: Callable[[Request], Awaitable[None]] | None = None,
        model_info: Mapping[str, Any] | None = {"model_path": "stub", "weight_version": "v1"},
        max_context: int = 1_000_000,
    ) -> None:
        self._reply = reply or (lambda input_ids, params: [1, 2, 3])
        self._faults = iter(faults)
        self._latency = latency
        self._model_info = model_info
        self._max_context = max_context
        self._hanging: dict[str, anyio.Event] = {}
        self._seen: set[int] = set()
        self.requests: list[Request] = []
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.live: set[str] = set()
        self.most_live = 0
        self.connections = 0
        self.url = ""

    def __repr__(self) -> str:
        return f"<StubServer {self.url}: {len(self.requests)} requests, {len(self.aborted)} aborted>"

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        if self._model_info is not None:
            app.router.add_get("/model_info", self._info)
            app.router.add_get("/server_info", self._info)
            app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            for event in self._hanging.values():
                event.set()
            await self._runner.cleanup()

    # -- routes --

    async def _info(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return _json({"version": "0.5.23", **(self._model_info or {})})

    async def _models(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return _json({"data": [{"id": "stub", "max_model_len": self._max_context}]})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (msgspec.json.decode(await request.read())).get("rid")
        self.aborted.append(rid)
        if rid in self._hanging:
            self._hanging[rid].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        arrived = Request(
            rid=body.get("rid", ""),
            input_ids=body["input_ids"],
            sampling_params=body.get("sampling_params", {}),
            headers=dict(request.headers),
            body=body,
        )
        if id(request.transport) not in self._seen:
            self._seen.add(id(request.transport))
            self.connections += 1
        self.requests.append(arrived)
        if arrived.rid in self.live:
            return _json({"error": {"message": f"Duplicate request ID detected: {arrived.rid}"}}, 400)
        self.live.add(arrived.rid)
        self.most_live = max(self.most_live, len(self.live))
        try:
            if self._latency is not None:
                await self._latency(arrived)
            return await self._answer(request, arrived, next(self._faults, "none"))
        finally:
            self.live.discard(arrived.rid)

    # -- answers --

    async def _answer(self, request: web.Request, arrived: Request, fault: Fault) -> web.StreamResponse:
        if fault in _ERRORS:
            status, body = _ERRORS[fault]
            return _json(body, status)
        if fault == "not_json":
            return web.Response(text="<html>Welcome</html>", content_type="text/html")
        if fault == "hang":
            self._hanging[arrived.rid] = anyio.Event()
            await self._hanging[arrived.rid].wait()
            fault = "abort"
        if fault == "reset":
            return _cut(request)
        payload = msgspec.json.encode(self._body(arrived, fault))
        if fault == "reset_in_body":
            return await self._stream(request, payload, [payload[: len(payload) // 2]])
        if fault == "drip":
            return await self._stream(request, payload, [payload[n : n + 1] for n in range(len(payload))])
        response = web.Response(body=payload, content_type="application/json")
        if fault == "close_after":
            await response.prepare(request)
            await response.write_eof()
            return _cut(request)
        return response

    async def _stream(self, request: web.Request, whole: bytes, parts: Sequence[bytes]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(whole)), "Content-Type": "application/json"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response if sum(map(len, parts)) == len(whole) else _cut(request)

    def _body(self, arrived: Request, fault: Fault) -> Mapping[str, Any]:
        said = self._reply(arrived.input_ids, arrived.sampling_params)
        if isinstance(said, Mapping):
            return said
        budget = arrived.sampling_params.get("max_new_tokens", 128)
        ids = list(said)[:budget]
        finish: dict[str, Any] = {"type": "stop", "matched": ids[-1] if ids else None}
        if len(ids) < len(said):
            finish = {"type": "length", "length": budget}
        if fault == "abort":
            ids, finish = ids[: len(ids) // 2], {"type": "abort", "message": "Aborted", "status_code": None}
        triples: list[list[Any]] = [[-1 / (1 + position), token, None] for position, token in enumerate(ids)]
        meta: dict[str, Any] = {
            "id": arrived.rid,
            "finish_reason": finish,
            "prompt_tokens": len(arrived.input_ids) + (fault == "wrong_count"),
            "completion_tokens": len(ids),
            "cached_tokens": max(0, len(arrived.input_ids) - 1),
            "weight_version": "v1",
            "weight_versions": [{"version": "v1", "start": 0, "end": len(ids)}],
            "output_token_logprobs": triples,
            "e2e_latency": 0.0,
        }
        if fault == "nan":
            triples[0][0] = None
        if fault == "no_logprobs":
            del meta["output_token_logprobs"]
        if fault == "old":
            meta = {name: meta[name] for name in ("finish_reason", "output_token_logprobs")}
        return {"text": "…", "output_ids": [*ids[:-1], ids[-1] + 1] if fault == "wrong_ids" else ids, "meta_info": meta}


_ERRORS: dict[str, tuple[int, dict[str, Any]]] = {
    "error_500": (500, {"error": {"message": "scheduler died"}}),
    "error_503": (503, {"object": "error", "message": "The request queue is full.", "type": "503", "code": 503}),
    "error_string": (400, {"error": "unknown sampling parameter: max_tokens"}),
    "error_type": (400, {"object": "error", "message": "bad request", "type": "Bad Request", "code": 400}),
    "error_context": (
        400,
        {"error": {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}},
    ),
    "error_in_200": (200, {"error": {"message": "out of memory", "code": 500}}),
}


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
