"""The protocol of vLLM 0.32 in front of the embedded engine: a server for tests that a client can tell from SGLang.

What a client relies on is as strict as in vLLM: ids are prefixed, and an abort of another id does nothing; unknown
fields are ignored; a request id may run twice; an abort returns the tokens so far; weights and version change in two
requests, and neither flushes; an adapter that its small cache has dropped is read again from its folder, and blocks of
the prefix cache belong to an adapter's name and folder, not to its content; a failed load ends the server at its next
request; NaN becomes -9999.0 with status 200. Distributions that the engine does not compute (truncated ones in
processed mode) are a 500.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import attrs
import msgspec
from aiohttp import web

from rollouts.engine import DEMO_MODEL
from rollouts.engine.adapters import Adapter, load_adapter
from rollouts.engine.frontend import Faults, Frontend
from rollouts.engine.loading import load_folder, load_weights
from rollouts.engine.requests import Request, Rules
from rollouts.errors import ConfigError

NAN = -9999.0
VOCAB = 509
"""Ids of the demo model; the rank of a sampled id, which no client reads."""
POLL_SECONDS = 0.005
NO_SCALE_OUT = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out"


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@attrs.define
class VLLMServer:
    """A running server, and what was sent to it."""

    frontend: Frontend
    mode: Literal["raw", "processed", "logits"] = "processed"
    """``--logprobs-mode``"""
    scale_out: bool = True
    """``--enable-scale-out``"""
    dev: bool = True
    """``VLLM_SERVER_DEV_MODE``"""
    rejects: bool = False
    """Whether a server that is paused by ``abort`` or ``wait`` rejects requests, as 0.33 does."""
    device: str = "cuda"
    """What the server reports."""
    ignores: frozenset[str] = frozenset()
    """Fields that vanish on their way, as in a proxy that does not know them."""
    cpu_loras: int = 8
    """``--max-cpu-loras``; 0 for a server without ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``."""
    loras: dict[str, Path] = attrs.field(factory=dict)
    """Names that requests may have, and the folders of their adapters."""
    key: str | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = attrs.field(factory=list)
    """Bodies of ``/inference/v1/generate``, without those of probes."""
    headers: list[dict[str, str]] = attrs.field(factory=list)
    calls: list[str] = attrs.field(factory=list)
    """Control requests, with their queries."""
    edit: Callable[[dict[str, Any]], Any] | None = None
    """Changes a response to a request that is no probe."""
    _running: dict[str, list[Request]] = attrs.field(factory=dict)
    _cached: OrderedDict[str, Adapter] = attrs.field(factory=OrderedDict)
    _incomplete: bool = False
    _rejecting: bool = False

    def routes(self) -> list[web.RouteDef]:
        posts = {
            "/inference/v1/generate": self._generate,
            "/inference/v1/abort_requests": self._abort,
            "/detokenize": self._detokenize,
        }
        gets = {
            "/v1/models": self._models,
            "/version": self._version,
            "/health": self._health,
            "/metrics": self._metrics,
        }
        if self.cpu_loras:
            posts |= {"/v1/load_lora_adapter": self._load_lora, "/v1/unload_lora_adapter": self._unload_lora}
        if self.dev:
            posts |= {
                "/abort_requests": self._abort_any,
                "/pause": self._pause,
                "/resume": self._resume,
                "/collective_rpc": self._reload,
                "/update_weight_version": self._rename,
                "/reset_prefix_cache": self._reset,
            }
            gets |= {"/is_paused": self._is_paused, "/weight_info": self._weight_info, "/server_info": self._config}
        return [
            *(web.post(path, handler) for path, handler in posts.items()),
            *(web.get(path, handler) for path, handler in gets.items()),
        ]

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.Response:
        self._check_scale_out()
        try:
            body = msgspec.json.decode(await http.read())
        except msgspec.DecodeError as error:
            raise Refused(f"1 validation error:\n  {{'type': 'json_invalid'}}: {error}") from error
        params = {name: value for name, value in body.get("sampling_params", {}).items() if name not in self.ignores}
        body = {name: value for name, value in body.items() if name not in self.ignores} | {"sampling_params": params}
        probe = "request_id" not in body
        if not probe:
            self.bodies.append(body)
            self.headers.append(dict(http.headers))
        if self._incomplete:
            assert http.transport is not None
            http.transport.close()
            raise Refused("EngineCore encountered an issue", 500)
        if self._rejecting:
            raise Refused("Generation is paused. Please retry after it resumes.", 503)
        external = f"generate-tokens-{body.get('request_id') or uuid.uuid4().hex}"
        ended = anyio.Event()
        request = Request(
            uuid.uuid4().hex,
            self._prompt(body),
            self._rules(params, len(body["token_ids"])),
            lambda _: ended.set(),
            namespace=body.get("cache_salt") or "",
        )
        if body.get("model") not in (None, "demo"):
            await self._adapt(request, body["model"])
        self._running.setdefault(external, []).append(request)
        self.frontend.enter([request])
        try:
            await ended.wait()
        finally:
            self.frontend.leave([request])
            self._running[external].remove(request)
        response = await self._response(external, request, body)
        if self.edit is not None and not probe:
            response = self.edit(response)
        return _json(response)

    async def _adapt(self, request: Request, name: str) -> None:
        if name not in self.loras:
            raise Refused(f"The model `{name}` does not exist.", 404)
        request.namespace += f"/{name}/{self.loras[name]}"
        request.adapter = await self._adapter(name, self.loras[name])

    async def _adapter(self, name: str, folder: Path) -> Adapter:
        """An adapter from the cache, or read again."""
        if name not in self._cached:
            try:
                loaded = await anyio.to_thread.run_sync(load_adapter, folder, self.frontend.scheduler.model.model)
            except ConfigError as error:
                raise Refused(str(error), 500) from error
            self._cached[name] = loaded
            if len(self._cached) > self.cpu_loras:
                self._cached.popitem(last=False)
        self._cached.move_to_end(name)
        return self._cached[name]

    async def _load_lora(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read())
        name, folder = body["lora_name"], Path(body["lora_path"])
        self.calls.append(f"/v1/load_lora_adapter {name}")
        if name in self.loras:
            raise Refused(f"The lora adapter '{name}' has already been loaded. Set 'load_inplace' to True.")
        self._cached.pop(name, None)
        await self._adapter(name, folder)
        self.loras[name] = folder
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_lora(self, http: web.Request) -> web.Response:
        name = msgspec.json.decode(await http.read())["lora_name"]
        self.calls.append(f"/v1/unload_lora_adapter {name}")
        if name not in self.loras:
            raise Refused(f"The lora adapter '{name}' cannot be found.", 404)
        del self.loras[name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        ids, loaded = body.get("token_ids"), self.frontend.loaded
        if not isinstance(ids, list) or not ids:
            raise Refused("1 validation error:\n  {'type': 'too_short', 'loc': 'body.token_ids'}")
        if min(ids) < 0:
            raise Refused("token_ids must not contain negative values")
        if max(ids) >= loaded.vocab_size:
            raise Refused(f"Token id {max(ids)} is out of vocabulary")
        longest = loaded.max_context
        if len(ids) > longest:
            raise Refused(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of {longest}."
            )
        if len(ids) == longest:
            raise Refused(
                f"The decoder prompt (length {len(ids)}) plus the number of requested output tokens (at least 1) is"
                f" longer than the maximum model length of {longest}."
            )
        return list(ids)

    def _rules(self, params: dict[str, Any], prompt: int) -> Rules:
        loaded = self.frontend.loaded
        if None in params.values():
            raise Refused("Input should be a valid number")
        temperature = params.get("temperature", 1.0)
        if not 0 <= temperature <= 2:
            raise Refused(f"temperature must be in [0, 2], got {temperature}.")
        truncation = [params.get("top_p", 1.0) < 1, params.get("top_k", 0) > 0, params.get("min_p", 0.0) > 0]
        if any(truncation) and temperature > 0 and self.mode == "processed":
            raise Refused("this server does not compute renormalised logprobs", 500)
        stop, room = params.get("stop", ()), loaded.max_context - prompt
        own = frozenset() if params.get("ignore_eos") else loaded.eos_ids
        allowed = params.get("allowed_token_ids")
        return Rules(
            temperature=temperature,
            top_p=params.get("top_p", 1.0) if temperature else 1.0,
            top_k=(params.get("top_k", 0) or -1) if temperature else -1,
            min_p=params.get("min_p", 0.0) if temperature else 0.0,
            limit=min(params.get("max_tokens", room), room),
            minimum=params.get("min_tokens", 0),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_ids=own | frozenset(params.get("stop_token_ids", ())),
            bias=()
            if not allowed
            else tuple((id_, -math.inf) for id_ in range(loaded.vocab_size) if id_ not in allowed),
            seed=params.get("seed", uuid.uuid4().int % 2**64) % 2**64,
        )

    async def _response(self, external: str, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        assert request.finish is not None
        params, count = body["sampling_params"], len(request.logprobs)
        sampled = request.tokens[request.prompt_tokens :]
        logprobs = request.logprobs
        if self._is_shaped(request):
            logprobs = await self._scores(request.tokens, request.prompt_tokens - 1)
        if self.mode == "logits":
            logprobs = [logprob + 9.0 for logprob in logprobs]
        finish = request.finish["type"]
        if request.finish.get("matched") == "NaN happened":
            finish = "length"
        content = [_token(token, logprob) for token, logprob in zip(sampled, logprobs, strict=True)]
        ends = [start for _, start in request.spans[1:]] + [count]
        choice = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": request.finish.get("matched"),
            "token_ids": sampled,
            "logprobs": {"content": content} if "logprobs" in params else None,
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(request.spans, ends, strict=True)
                if end > start
            ],
        }
        scores = None
        if "prompt_logprobs" in params:
            scored = await self._scored(body["token_ids"], 0, params["prompt_logprobs"])
            columns = zip(body["token_ids"][1:], scored.prompt_logprobs, strict=True)
            scores = [None, *({str(token): {"logprob": one, "rank": VOCAB}} for token, one in columns)]
            for row, tops in zip(scores[1:], scored.prompt_tops, strict=False):
                row |= {str(top): {"logprob": one, "rank": rank} for rank, (one, top, _) in enumerate(tops, 1)}
        details = {"cached_tokens": 0 if scores else request.cached_tokens}
        return {
            "request_id": external,
            "model": body.get("model") or "demo",
            "usage": {"prompt_tokens": request.prompt_tokens, "prompt_tokens_details": details},
            "prompt_logprobs": scores,
            "prompt_token_ids": body["token_ids"] if body.get("return_token_ids") else None,
            "output_mode": "tokens",
            "choices": [choice],
        }

    def _is_shaped(self, request: Request) -> bool:
        """Whether raw logprobs differ from those of the engine."""
        return self.mode == "raw" and (request.rules.temperature not in (0.0, 1.0) or bool(request.rules.bias))

    async def _scores(self, ids: list[int], start: int) -> list[float]:
        """The logprobs of the ids after a position, at temperature 1."""
        return (await self._scored(ids, start)).prompt_logprobs

    async def _scored(self, ids: list[int], start: int, tops: int = 0) -> Request:
        scored = anyio.Event()
        request = Request(uuid.uuid4().hex, ids[:], Rules(limit=0), lambda _: scored.set(), start, tops=tops)
        self.frontend.enter([request])
        await scored.wait()
        self.frontend.leave([request])
        return request

    async def _abort(self, http: web.Request) -> web.Response:
        self._check_scale_out()
        ids = msgspec.json.decode(await http.read())["request_ids"]
        self._abort_ids(ids)
        return web.Response()

    async def _abort_any(self, http: web.Request) -> web.Response:
        ids = msgspec.json.decode(await http.read()).get("request_ids") or list(self._running)
        return _json({"status": "aborted", "aborted": self._abort_ids(ids)})

    def _abort_ids(self, ids: list[str]) -> int:
        requests = [request for one in ids for request in self._running.get(one, [])]
        self.frontend.scheduler.abort(requests)
        return len(requests)

    # -- control ------------------------------------------------------------------------------------------------------

    async def _pause(self, http: web.Request) -> web.Response:
        self.calls.append(f"/pause?{http.query_string}")
        mode, scheduler = http.query.get("mode", "abort"), self.frontend.scheduler
        clear = http.query.get("clear_cache", "true") == "true"
        if mode == "keep":
            await self.frontend.call(lambda: scheduler.pause("retract" if clear else "in_place"))
        elif mode == "abort":
            await self.frontend.call(lambda: scheduler.pause("abort"))
        elif mode == "wait":
            await self.frontend.call(lambda: scheduler.set_draining(True))
            while scheduler.running:  # noqa: ASYNC110 - the state is the engine thread's
                await anyio.sleep(POLL_SECONDS)
            await self.frontend.call(lambda: scheduler.pause("in_place"))
            scheduler.post(lambda: scheduler.set_draining(False))
        else:
            raise Refused(f"Input should be 'abort', 'wait' or 'keep', got {mode!r}")
        self._rejecting = self.rejects and mode != "keep"
        if clear:
            await self.frontend.call(scheduler.flush)
        return _json({"status": "paused"})

    async def _resume(self, http: web.Request) -> web.Response:
        self.calls.append("/resume")
        self._rejecting = False
        await self.frontend.call(self.frontend.scheduler.resume)
        return _json({"status": "resumed"})

    async def _is_paused(self, http: web.Request) -> web.Response:
        return _json({"is_paused": self.frontend.scheduler.paused})

    async def _reload(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read())
        self.calls.append(f"/collective_rpc {body['method']}")
        folder = Path(body["kwargs"]["weights_path"])
        try:
            weights = await anyio.to_thread.run_sync(load_weights, folder, self.frontend.loaded.dtype)
            await self.frontend.call(lambda: self.frontend.scheduler.replace(weights, None))
        except ConfigError as error:
            self._incomplete = True
            raise Refused(str(error), 500) from error
        self._incomplete = False
        return _json({"results": [None]})

    async def _rename(self, http: web.Request) -> web.Response:
        name = msgspec.json.decode(await http.read())["new_version"]
        self.calls.append(f"/update_weight_version {name}")
        await self.frontend.rename(name)
        return _json({"success": True, "new_version": name})

    async def _reset(self, http: web.Request) -> web.Response:
        self.calls.append("/reset_prefix_cache")
        if http.query.get("reset_running_requests") == "true" and self.frontend.scheduler.paused:
            await self.frontend.call(lambda: self.frontend.scheduler.pause("retract"))
        return _json({"success": await self.frontend.call(self.frontend.scheduler.flush)})

    # -- information --------------------------------------------------------------------------------------------------

    async def _models(self, http: web.Request) -> web.Response:
        loaded = self.frontend.loaded
        card = {"id": "demo", "owned_by": "vllm", "root": str(loaded.path), "max_model_len": loaded.max_context}
        adapters = [
            {"id": name, "owned_by": "vllm", "root": str(folder), "parent": "demo", "max_model_len": None}
            for name, folder in self.loras.items()
        ]
        return _json({"object": "list", "data": [card, *adapters]})

    async def _version(self, http: web.Request) -> web.Response:
        return _json({"version": "0.32.0"})

    async def _weight_info(self, http: web.Request) -> web.Response:
        return _json({"weight_version": self.frontend.version})

    async def _detokenize(self, http: web.Request) -> web.Response:
        ids = msgspec.json.decode(await http.read())["tokens"]
        return _json({"prompt": self.frontend.loaded.tokenizer.decode(ids)})

    async def _config(self, http: web.Request) -> web.Response:
        return _json({"vllm_config": f"dtype=torch.{self.frontend.loaded.dtype}, device_config={self.device}, seed=0"})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, http: web.Request) -> web.Response:
        scheduler = self.frontend.scheduler
        names = {"num_requests_running": scheduler.running, "num_requests_waiting": scheduler.queued}
        names["generation_tokens_total"] = scheduler.generated
        lines = [f'vllm:{name}{{engine="0",model_name="demo"}} {float(value)}' for name, value in names.items()]
        return web.Response(text="# HELP\n" + "\n".join(lines) + "\n")

    def _check_scale_out(self) -> None:
        if not self.scale_out:
            raise Refused(NO_SCALE_OUT, 403)

    @web.middleware
    async def errors(
        self, http: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        guarded = http.path.startswith(("/v1/", "/inference/"))
        if self.key is not None and guarded and http.headers.get("Authorization") != f"Bearer {self.key}":
            return _json({"error": "Unauthorized"}, 401)
        try:
            return await handler(http)
        except Refused as refused:
            error = {"message": str(refused), "type": "Error", "param": None, "code": refused.status}
            return _json({"error": error}, refused.status)


def _token(token: int, logprob: float) -> dict[str, Any]:
    if logprob != logprob:
        return {"token_id": token, "logprob": NAN, "rank": None, "top_logprobs": []}
    return {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


@contextlib.asynccontextmanager
async def vllm_server(
    model: Path = DEMO_MODEL, *, port: int = 0, max_context: int | None = None, **options: Any
) -> AsyncIterator[VLLMServer]:
    """Serve a model folder while the context lasts; ``options`` are fields of :class:`VLLMServer`."""
    loaded = await anyio.to_thread.run_sync(load_folder, model, max_context, "float32")
    frontend = Frontend(loaded, 16, max_queued=None, health_seconds=20.0, faults=Faults())
    server = VLLMServer(frontend, **options)
    app = web.Application(client_max_size=2**30, middlewares=[server.errors])
    app.add_routes(server.routes())
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, keepalive_timeout=5.0)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        with anyio.move_on_after(5.0, shield=True):
            await frontend.stop()
            await runner.cleanup()
