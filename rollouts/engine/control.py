"""All routes except ``/generate``: abort, pause, weights, cache, health, server information, tokenization.

Invariant: each response has the status and format of SGLang 0.5.23; ``DIFFERENCES`` lists the exceptions.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollouts.engine.frontend import Frontend
from rollouts.engine.protocol import Refusal, check_ids, decoded
from rollouts.engine.scheduler import PauseMode
from rollouts.errors import ConfigError

__all__ = ["PROTOCOL_VERSION", "control_routes"]

PROTOCOL_VERSION = "0.5.23"
"""The version of SGLang whose protocol is implemented; clients read it from ``/server_info``."""
DIFFERENCES = (
    "An id outside the vocabulary is a 400; SGLang crashes.",
    "sampling_seed is always honoured; SGLang needs --enable-deterministic-inference.",
    "A health probe of an idle engine answers at once; SGLang's takes a second.",
    "A weight update of a busy server waits for its requests and succeeds; in SGLang it sometimes fails to flush then,"
    " because the last request still counts as running. running_server(unflushed_updates=True) reproduces it.",
    "Each slot has room for a whole context, so that the K/V pool is never the limit of a request.",
    "One prompt has one reply (n is 1), and token_ids_logprob, return_sampling_mask,"
    " sessions, penalties, grammars and beam search are a 400 that names the field.",
    "The model does not see images: it computes with the embedding of the placeholder. The processor of the model's"
    " folder expands placeholders, so that ids, counts and refusals are those of a server.",
    "A request that names an unloaded LoRA adapter is a 400; SGLang loads it again from its folder. Adapters are plain"
    " LoRA of linear layers, of any number and rank; use_rslora is honoured, which SGLang ignores.",
    "A token of top_k 1 always has its logprob at temperature 1; SGLang does so at temperature 0, or if the whole batch"
    " is greedy.",
)
"""The deliberate differences from SGLang, which ``/server_info`` reports as ``differences``."""
FLUSH_SECONDS = 600.0


class _Abort(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: PauseMode = "abort"


class _FromDisk(msgspec.Struct):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class _Version(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class _Lora(msgspec.Struct):
    lora_name: str
    lora_path: str


class _LoraName(msgspec.Struct):
    lora_name: str


class _Tokenize(msgspec.Struct):
    prompt: str | list[str]
    add_special_tokens: bool = True


class _Detokenize(msgspec.Struct):
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


def control_routes(frontend: Frontend) -> list[web.RouteDef]:
    """The routes of a single engine."""
    control = _Control(frontend)
    gets: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
        "/health": control.health,
        "/health_generate": control.health,
        "/ready": control.ready,
        "/model_info": control.model_info,
        "/get_model_info": control.model_info,
        "/server_info": control.server_info,
        "/get_server_info": control.server_info,
        "/v1/models": control.models,
        "/v1/loads": control.loads,
        "/flush_cache": control.flush_cache,
    }
    posts: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
        "/abort_request": control.abort_request,
        "/pause_generation": control.pause_generation,
        "/continue_generation": control.continue_generation,
        "/update_weights_from_disk": control.update_weights_from_disk,
        "/update_weight_version": control.update_weight_version,
        "/flush_cache": control.flush_cache,
        "/load_lora_adapter": control.load_lora_adapter,
        "/unload_lora_adapter": control.unload_lora_adapter,
        "/tokenize": control.tokenize,
        "/v1/tokenize": control.tokenize,
        "/detokenize": control.detokenize,
        "/v1/detokenize": control.detokenize,
    }
    return [
        *(web.get(path, handler) for path, handler in gets.items()),
        *(web.post(path, handler) for path, handler in posts.items()),
    ]


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


class _Control:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._loaded = frontend.loaded

    # -- requests and weights -----------------------------------------------------------------------------------------

    async def abort_request(self, http: web.Request) -> web.Response:
        body = decoded(await http.read(), _Abort)
        if body.abort_all:
            self._frontend.abort_all()
        elif body.rid is not None:
            self._frontend.abort(body.rid)
        return web.Response()

    async def pause_generation(self, http: web.Request) -> web.Response:
        mode = decoded(await http.read(), _Pause).mode
        await self._frontend.call(lambda: self._frontend.scheduler.pause(mode))
        return _json({"status": "ok", "message": f"Generation is paused ({mode})."})

    async def continue_generation(self, http: web.Request) -> web.Response:
        decoded(await http.read(), dict[str, Any])
        await self._frontend.call(self._frontend.scheduler.resume)
        return _json({"status": "ok", "message": "Generation is resumed."})

    async def update_weights_from_disk(self, http: web.Request) -> web.Response:
        body = decoded(await http.read(), _FromDisk)
        if body.abort_all_requests:
            self._frontend.abort_all()
        success, message, paused = await self._frontend.update_weights(
            Path(body.model_path), body.weight_version, flush=body.flush_cache
        )
        content = {"success": success, "message": message, "num_paused_requests": paused}
        return _json(content, 200 if success else 400)

    async def update_weight_version(self, http: web.Request) -> web.Response:
        body = decoded(await http.read(), _Version)
        if body.abort_all_requests:
            self._frontend.abort_all()
        await self._frontend.rename(body.new_version)
        message = f"Weights are now called {body.new_version}."
        return _json({"success": True, "message": message, "new_version": body.new_version})

    async def flush_cache(self, http: web.Request) -> web.Response:
        timeout = http.query.get("timeout", "0")
        try:
            seconds = min(max(float(timeout), 0.0), FLUSH_SECONDS)
        except ValueError as error:
            raise Refusal(f"timeout: got {timeout!r}; expected seconds") from error
        if await self._frontend.flush(seconds):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def load_lora_adapter(self, http: web.Request) -> web.Response:
        body = decoded(await http.read(), _Lora)
        return await self._change(self._frontend.load_adapter(body.lora_name, Path(body.lora_path)))

    async def unload_lora_adapter(self, http: web.Request) -> web.Response:
        return await self._change(self._frontend.unload_adapter(decoded(await http.read(), _LoraName).lora_name))

    async def _change(self, change: Awaitable[None]) -> web.Response:
        """Change the adapters; respond with the adapters that are loaded then."""
        error = None
        try:
            await change
        except ConfigError as problem:
            error = str(problem)
        loaded = {name: str(adapter.folder) for name, adapter in self._frontend.adapters.items()}
        content = {"success": error is None, "error_message": error or "", "loaded_adapters": loaded}
        return _json(content, 200 if error is None else 400)

    # -- health -------------------------------------------------------------------------------------------------------

    async def health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if await self._frontend.probe() else 503)

    async def ready(self, http: web.Request) -> web.Response:
        return web.Response(status=503 if self._frontend.scheduler.paused else 200)

    # -- information --------------------------------------------------------------------------------------------------

    async def model_info(self, http: web.Request) -> web.Response:
        return _json(
            {
                "model_path": str(self._frontend.reported_path),
                "tokenizer_path": str(self._loaded.path),
                "is_generation": True,
                "weight_version": self._frontend.version,
                "load_format": "auto",
                "model_type": self._loaded.model_type,
                "architectures": [self._loaded.architecture],
            }
        )

    async def server_info(self, http: web.Request) -> web.Response:
        scheduler = self._frontend.scheduler
        return _json(
            {
                "version": PROTOCOL_VERSION,
                "engine": "rollouts",
                "model_path": str(self._frontend.reported_path),
                "differences": DIFFERENCES,
                "context_length": self._loaded.max_context,
                "max_req_input_len": self._loaded.max_input,
                "max_total_num_tokens": scheduler.model.slots * self._loaded.max_context,
                "max_running_requests": scheduler.model.slots,
                "max_queued_requests": self._frontend.max_queued,
                "device": str(scheduler.model.device),
                "dtype": self._loaded.dtype,
                "grammar_backend": "none",
                "uptime_s": time.time() - self._frontend.started,
                "internal_states": [{"paused": scheduler.paused, "generated_tokens": scheduler.generated}],
            }
        )

    async def models(self, http: web.Request) -> web.Response:
        name = str(self._loaded.path)
        entry = {
            "id": name,
            "object": "model",
            "created": int(self._frontend.started),
            "owned_by": "rollouts",
            "root": name,
            "max_model_len": self._loaded.max_context,
        }
        adapters = [
            {**entry, "id": adapter, "root": str(found.folder), "parent": name, "max_model_len": None}
            for adapter, found in self._frontend.adapters.items()
        ]
        return _json({"object": "list", "data": [entry, *adapters]})

    async def loads(self, http: web.Request) -> web.Response:
        scheduler = self._frontend.scheduler
        running, waiting = scheduler.running, scheduler.queued
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "max_running_requests": scheduler.model.slots,
        }
        return _json({"timestamp": time.time(), "version": PROTOCOL_VERSION, "dp_rank_count": 1, "loads": [load]})

    # -- text ---------------------------------------------------------------------------------------------------------

    async def tokenize(self, http: web.Request) -> web.Response:
        body = decoded(await http.read(), _Tokenize)
        tokenizer = self._tokenizer()
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        rows = [list(tokenizer.encode(text, add_special_tokens=body.add_special_tokens)) for text in texts]
        counts = [len(row) for row in rows]
        single = isinstance(body.prompt, str)
        content = {"tokens": rows[0] if single else rows, "count": counts[0] if single else counts}
        return _json({**content, "max_model_len": self._loaded.max_context})

    async def detokenize(self, http: web.Request) -> web.Response:
        body = decoded(await http.read(), _Detokenize)
        tokenizer = self._tokenizer()
        single = not any(isinstance(row, list) for row in body.tokens)
        rows: list[Any] = [body.tokens] if single else body.tokens
        for row in rows:
            check_ids("tokens", row, self._loaded.vocab_size)
        texts = [tokenizer.decode(row, skip_special_tokens=body.skip_special_tokens) for row in rows]
        return _json({"text": texts[0] if single else texts})

    def _tokenizer(self) -> Any:
        if self._loaded.tokenizer is None:
            raise Refusal("the model folder has no tokenizer")
        return self._loaded.tokenizer
