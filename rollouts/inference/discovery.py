"""Description of the server at a URL.

Invariant: a server that is not SGLang raises an error that quotes its responses, so that a wrong port or server is
noticed before the first rollout. Older servers and routers lack some routes and are recognised by the others.

This module does not know completions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio

from rollouts.dtypes.inference import NEEDS_TOKEN_IDS
from rollouts.errors import ConfigError, EndpointError, EndpointRefused, EndpointUnavailable, without_password
from rollouts.http.answers import RETRIED_STATUSES, loads, message_of
from rollouts.http.client import ConnectFailed, HttpClient, ProtocolError
from rollouts.inference.aborts import workers_behind
from rollouts.inference.base import ServerInfo
from rollouts.inference.wire_errors import error_of

__all__ = ["Routes", "describe_server", "http_workers", "length_of", "merged", "posted", "served_version", "text_of"]

_LOG = logging.getLogger(__name__)
_WORKER_SECONDS = 10.0
_UNNAMED = (None, "default")
_SGLANG_FIELDS = ("model_path", "tokenizer_path", "weight_version")


async def describe_server(transport: HttpClient, url: str, headers: Mapping[str, str]) -> ServerInfo:
    """Query the description of one server; for a router, merge the descriptions of its workers that answer.

    A router passes such a request to any worker, also to a dead one, and drops the length of the context.

    Raises:
        EndpointUnavailable: no server listens there, or it is not ready.
        EndpointRefused: wrong API key, or not an SGLang server.
        ConfigError: the workers of a router serve different models.
    """
    workers: Sequence[str] = ()
    with contextlib.suppress(EndpointUnavailable):  # raised again below, with its reason
        workers = await workers_behind(transport, url, headers)
    infos: list[ServerInfo] = []

    async def ask(worker: str) -> None:
        with contextlib.suppress(EndpointError), anyio.move_on_after(_WORKER_SECONDS):
            infos.append(await _describe_one(transport, worker, headers))
            return
        _LOG.warning("%s lists the worker %s, which does not describe itself", without_password(url), worker)

    async with anyio.create_task_group() as tasks:
        for worker in workers:
            tasks.start_soon(ask, worker)
    return merged(infos) if infos else await _describe_one(transport, url, headers)


async def _describe_one(transport: HttpClient, url: str, headers: Mapping[str, str]) -> ServerInfo:
    routes = Routes(transport, url, headers, "an SGLang server")
    model = await routes.first("/model_info", "/get_model_info")
    server = await routes.first("/server_info", "/get_server_info")
    if not any(field in response for response in (model, server) for field in _SGLANG_FIELDS):
        raise EndpointRefused(
            f"{without_password(url)} is not an SGLang server: {'; '.join(routes.log)}."
            " Expected a model_path from /model_info or /server_info; a vLLM server needs --provider vllm"
            f" (Endpoint.provider){routes.hint}. Other servers cannot be used: {NEEDS_TOKEN_IDS}"
        )
    models = await routes.first("/v1/models")
    workers = length_of(server.get("tokenizer_worker_num"))
    if workers is not None and workers > 1:
        weights = await _replied_version(transport, url, headers)
    else:
        weights = text_of(model.get("weight_version")) or text_of(server.get("weight_version"))
    skips_tokenizer = server.get("skip_tokenizer_init")
    deterministic, grammars = server.get("enable_deterministic_inference"), server.get("grammar_backend")
    return ServerInfo(
        version=_version(server),
        model=text_of(model.get("model_path")) or text_of(server.get("model_path")),
        weight_version=weights,
        max_context=_max_context(models, server),
        http_workers=workers,
        has_tokenizer=not skips_tokenizer if isinstance(skips_tokenizer, bool) else None,
        has_grammars=grammars != "none" if isinstance(grammars, str) else None,
        has_structural_tags=grammars in _WITH_TAGS if isinstance(grammars, str) else None,
        honours_seeds=deterministic if isinstance(deterministic, bool) else None,
    )


_WITH_TAGS = ("xgrammar", "llguidance")
"""The grammar backends with structural tags (SGLang 0.5.23, constrained/)."""


def _version(server: Mapping[str, Any]) -> str | None:
    """The version of SGLang; the embedded engine reports the version whose protocol it has."""
    version = text_of(server.get("version"))
    return f"{version} (protocol of the embedded engine)" if server.get("engine") == "rollouts" else version


async def http_workers(transport: HttpClient, url: str, headers: Mapping[str, str]) -> int:
    """Return the number of HTTP workers of one server (``--tokenizer-worker-num``).

    Raises:
        EndpointUnavailable: no server listens there, or it is not ready.
        EndpointRefused: wrong API key, or not an SGLang server.
    """
    server = await Routes(transport, url, headers, "an SGLang server").first("/server_info", "/get_server_info")
    return length_of(server.get("tokenizer_worker_num")) or 1


async def served_version(transport: HttpClient, url: str, headers: Mapping[str, str]) -> str | None:
    """Return the weight version of one server; ``None`` if it does not report one.

    A server with several HTTP workers is asked for a reply of one token: ``/model_info`` has the version that the
    worker which answers stored last.

    Raises:
        EndpointUnavailable: no server listens there, it is not ready, or it aborted the reply.
        EndpointRefused: wrong API key, or not an SGLang server.
    """
    if await http_workers(transport, url, headers) > 1:
        return await _replied_version(transport, url, headers)
    model = await Routes(transport, url, headers, "an SGLang server").first("/model_info", "/get_model_info")
    return text_of(model.get("weight_version"))


async def _replied_version(transport: HttpClient, url: str, headers: Mapping[str, str]) -> str | None:
    from rollouts.inference.generate_probe import (  # here: few servers have several workers
        VERSION_PROBE,
        replied_version,
    )

    (payload,) = await posted([VERSION_PROBE], transport, url + "/generate", headers)
    return replied_version(payload)


async def posted(bodies: Iterable[bytes], transport: HttpClient, url: str, headers: Mapping[str, str]) -> list[bytes]:
    """Post one body after the other; raise the error of a response whose status is not 200."""
    answers = []
    for body in bodies:
        status, payload = await transport.post(url, body, headers)
        if status != 200:
            raise error_of(status, f"{message_of(payload)} (POST {without_password(url)})")
        answers.append(payload)
    return answers


def merged(infos: list[ServerInfo]) -> ServerInfo:
    """Combine the descriptions of several workers: fields on which all agree, and the shortest context.

    Servers of one named version may report different models: an update that did not flush changes the version only.

    Raises:
        ConfigError: the workers serve different models.
    """
    models = sorted({info.model for info in infos if info.model is not None})
    versions = {info.weight_version for info in infos}
    if len(models) > 1 and (len(versions) > 1 or not versions.isdisjoint(_UNNAMED)):
        raise ConfigError.of("Endpoint.base_url", models, "workers that serve one model")

    def agreed(field: str) -> Any:
        values = {getattr(info, field) for info in infos}
        return values.pop() if len(values) == 1 else None

    contexts = [info.max_context for info in infos if info.max_context is not None]
    return ServerInfo(
        version=agreed("version"),
        model=agreed("model"),
        weight_version=agreed("weight_version"),
        max_context=min(contexts, default=None),
        http_workers=max((info.http_workers for info in infos if info.http_workers is not None), default=None),
        has_tokenizer=_all_of(info.has_tokenizer for info in infos),
        has_grammars=_all_of(info.has_grammars for info in infos),
        has_structural_tags=_all_of(info.has_structural_tags for info in infos),
        honours_seeds=_all_of(info.honours_seeds for info in infos),
    )


def _all_of(values: Iterable[bool | None]) -> bool | None:
    """Whether all servers that say so have a property; ``None`` if none says."""
    known = [value for value in values if value is not None]
    return all(known) if known else None


class Routes:
    """GET requests to one server, expected to be of a ``kind``, with a log of the responses."""

    def __init__(self, transport: HttpClient, url: str, headers: Mapping[str, str], kind: str) -> None:
        self._kind = kind
        self._transport = transport
        self._url = url
        self._headers = headers
        self.log: list[str] = []

    @property
    def hint(self) -> str:
        """The end of a refusal if the URL ends in ``/v1``, as clients of the OpenAI API take it; else empty."""
        ends = self._url.rstrip("/").endswith("/v1")
        return ". The URL ends in /v1: leave that out" if ends else ""

    async def first(self, *routes: str) -> dict[str, Any]:
        """Return the JSON object of the first route that has one; an empty object if there is none."""
        for route in routes:
            where = without_password(self._url) + route
            try:
                status, payload = await self._transport.get(self._url + route, self._headers)
            except ConnectFailed as error:
                where = without_password(self._url)
                raise EndpointUnavailable(
                    f"no server answers at {where}: {error}. Start the server, or correct Endpoint.base_url"
                ) from error
            except ProtocolError as error:
                raise EndpointRefused(f"{without_password(self._url)} is not {self._kind}: {error}") from error
            if status in (401, 403):
                raise EndpointRefused(f"{where}: status {status}: {message_of(payload)}. Check Endpoint.api_key")
            if status >= 500 or status in RETRIED_STATUSES:
                raise EndpointUnavailable(f"{where}: status {status}: {message_of(payload)}. Is it ready?")
            response = loads(payload) if status == 200 else None
            if isinstance(response, dict):
                self.log.append(f"GET {route} returned JSON with {', '.join(list(response)[:5]) or 'no fields'}")
                return response
            self.log.append(f"GET {route} returned status {status}: {message_of(payload)[:80]}")
        return {}


def _max_context(models: dict[str, Any], server: dict[str, Any]) -> int | None:
    """Return the number of tokens that prompt and reply can have: SGLang reserves a part of context and KV pool."""
    cards = models.get("data")
    lengths = [card.get("max_model_len") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    model = (length_of(length) for length in (*lengths, server.get("context_length")))
    limits = [length for length in model if length is not None][:1]
    longest_prompt, pool = length_of(server.get("max_req_input_len")), length_of(server.get("max_total_num_tokens"))
    if longest_prompt is not None:
        limits.append(longest_prompt + _REPLY_BEYOND_PROMPT)
    elif pool is not None:
        limits.append(pool - _RESERVED)
    return max(1, min(limits)) if limits else None


_RESERVED = 2
"""Reserved tokens of context or pool: a budget up to the end of the context is cut by 2 (SGLang 0.5.23)."""
_REPLY_BEYOND_PROMPT = 4
"""``max_req_input_len`` is the smaller of context and pool, less 6 (SGLang 0.5.23)."""


def length_of(value: Any) -> int | None:
    """A number of tokens; ``None`` for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def text_of(value: Any) -> str | None:
    """A non-empty string; ``None`` for any other value."""
    return value if isinstance(value, str) and value else None
