"""A policy behind SGLang's native ``/generate``.

Invariant: the ids sent are the ids given, and their checksum comes back with the completion. No two generations of one
call are alive at once: every attempt has a request id of its own, and what may still be running under the old one is
aborted before the next. A call that is cancelled aborts its request.

This module knows no message, no environment and no sample.
"""

from __future__ import annotations

import collections
import random
import time
import uuid
import weakref
import zlib
from asyncio import AbstractEventLoop, get_running_loop
from types import TracebackType
from typing import Any, Self

import anyio
import attrs
import msgspec
import numpy as np

from rollouts.dtypes import Completion, Endpoint, SamplingParams, TokenColumn
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable, boundary
from rollouts.inference.base import ServerInfo
from rollouts.inference.transport import Answer, LostError, NotSentError, Transport
from rollouts.inference.wire import error_of, read_completion, request_tail

__all__ = ["SGLangPolicy", "shared_policy"]

_ABORT_SECONDS = 5.0
_ABORTS_AT_ONCE = 64
_DESCRIBE_SECONDS = 30.0
_FIRST_BACKOFF = 0.25
_LONGEST_BACKOFF = 10.0
_SESSIONS_KEPT = 16_384


@attrs.define
class _Session:
    """What is kept of one growing sequence: its worker, and its ids as they stand in a request's body."""

    worker: int
    encoded: bytearray = attrs.field(factory=bytearray)
    count: int = 0
    last: int = -1
    digest: int = 0


@attrs.define
class Totals:
    """What a policy has done."""

    requests: int = 0
    retries: int = 0
    aborts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    encoded_tokens: int = 0
    """Prompt ids that were written as JSON: those that were new since the session's last call."""


class SGLangPolicy:
    """A client of one SGLang server, or of several workers that serve the same model.

    Args:
        endpoint: where and how to ask.
        vocab_size: ids at or above it are refused before they are sent: they would kill a real server.
    """

    def __init__(self, endpoint: Endpoint, *, vocab_size: int | None = None) -> None:
        self.endpoint = endpoint
        self.vocab_size = vocab_size
        self.totals = Totals()
        self.in_flight = [0] * len(endpoint.base_url)
        """Requests at each worker now."""
        headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
        self._running: dict[str, str] = {}
        """Request ids that a server may be sampling for, and where they were sent."""
        self._routers: dict[str, bool] = {}
        self._transport = Transport(connect_seconds=endpoint.connect_seconds, headers=headers)
        self._sessions: collections.OrderedDict[str, _Session] = collections.OrderedDict()

    def __repr__(self) -> str:
        return f"<SGLangPolicy {', '.join(self.endpoint.base_url)}: {sum(self.in_flight)} in flight, {self.totals}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def complete(
        self, tokens: TokenColumn, sampling: SamplingParams, *, stop_token_ids: tuple[int, ...] = (), session: str = ""
    ) -> Completion:
        """See :class:`rollouts.inference.base.Policy`."""
        self._check_range(tokens)
        began = time.monotonic()
        kept = self._session(session)
        self._encode(kept, tokens)
        with boundary(EndpointUnavailable, "POST /generate", seconds=self.endpoint.request_seconds):
            for attempt in range(self.endpoint.max_retries + 1):
                try:
                    return await self._attempt(kept, sampling, stop_token_ids, session, began)
                except EndpointUnavailable as error:
                    if attempt == self.endpoint.max_retries:
                        raise EndpointUnavailable(f"{error} (after {attempt + 1} attempts)") from error
                self.totals.retries += 1
                kept.worker = self._idlest(but=kept.worker)
                await anyio.sleep(random.random() * min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2**attempt))
        raise AssertionError("the loop returns or raises")

    async def _attempt(
        self, kept: _Session, sampling: SamplingParams, stop_token_ids: tuple[int, ...], session: str, began: float
    ) -> Completion:
        request_id = uuid.uuid4().hex  # of fixed width: SGLang aborts every request whose id begins with the one named
        url = self.endpoint.base_url[kept.worker]
        place = f"{url}/generate"
        body = b"".join((b'{"input_ids":[', kept.encoded, b"]", request_tail(sampling, stop_token_ids, request_id)))
        headers = {"X-SMG-Routing-Key": session} if session else None
        worker = kept.worker
        self.in_flight[worker] += 1
        self._running[request_id] = url
        self.totals.requests += 1
        answered = False
        try:
            answer = await self._transport.send("POST", place, body, headers)
            answered = True
        except NotSentError as error:
            answered = True
            raise EndpointUnavailable(f"{place}: {error}") from error
        except LostError as error:
            raise EndpointUnavailable(f"{place}: {error}") from error
        finally:
            self.in_flight[worker] -= 1
            del self._running[request_id]
            if not answered:  # lost, or cancelled: the server may be sampling for nobody
                await self._abort(url, request_id)
        completion = read_completion(
            answer,
            sent=kept.count,
            prompt_digest=kept.digest,
            request_id=request_id,
            seconds=time.monotonic() - began,
            place=place,
        )
        self.totals.prompt_tokens += kept.count
        self.totals.cached_tokens += completion.cached_tokens
        self.totals.sampled_tokens += len(completion.tokens)
        return completion

    async def interrupt(self) -> None:
        """Abort the requests in flight, by id: each is answered at once with what it has, and nobody else's is touched.

        A request that has not reached its worker yet is not found there; call again while any is in flight.
        """
        limiter = anyio.CapacityLimiter(_ABORTS_AT_ONCE)

        async def abort(url: str, request_id: str) -> None:
            async with limiter:
                await self._abort(url, request_id)

        async with anyio.create_task_group() as aborts:
            for request_id, url in list(self._running.items()):
                aborts.start_soon(abort, url, request_id)

    async def _abort(self, url: str, request_id: str) -> None:
        """Tell a server, or every worker behind a router, to stop; shielded, and given up after a few seconds."""
        self.totals.aborts += 1
        with anyio.move_on_after(_ABORT_SECONDS, shield=True):
            body = msgspec.json.encode({"rid": request_id})
            for worker in await self._workers_at(url):
                try:
                    await self._transport.send("POST", f"{worker}/abort_request", body)
                except (NotSentError, LostError):
                    continue  # a server that is gone samples nothing

    async def _workers_at(self, url: str) -> list[str]:
        """The servers that an abort must reach: a router passes none on, and does not say who has the request."""
        if self._routers.get(url) is False:
            return [url]
        try:
            listed = await self._ask(url, "/workers")
        except (EndpointRefused, EndpointUnavailable):
            return [url]
        workers = listed.get("workers") if listed is not None else None
        self._routers[url] = isinstance(workers, list)
        if not isinstance(workers, list):
            return [url]
        return [entry["url"] for entry in workers if isinstance(entry, dict) and isinstance(entry.get("url"), str)]

    # -- sessions --

    def _session(self, name: str) -> _Session:
        kept = self._sessions.get(name) if name else None
        if kept is None:
            kept = _Session(worker=self._idlest())
            if name:
                self._sessions[name] = kept
                if len(self._sessions) > _SESSIONS_KEPT:
                    self._sessions.popitem(last=False)
        elif name:
            self._sessions.move_to_end(name)
        return kept

    def _idlest(self, but: int | None = None) -> int:
        """The worker with the fewest requests; another than ``but`` where there is one."""
        workers = [worker for worker in range(len(self.in_flight)) if worker != but] or [0]
        return min(workers, key=lambda worker: self.in_flight[worker])

    def _encode(self, kept: _Session, tokens: TokenColumn) -> None:
        """Write the ids that are new since the last call behind those that are there."""
        if kept.count > len(tokens) or (kept.count and kept.last != int(tokens[kept.count - 1])):
            kept.encoded, kept.count, kept.digest = bytearray(), 0, 0
        new = tokens[kept.count :]
        if len(new):
            if kept.count:
                kept.encoded += b","
            kept.encoded += msgspec.json.encode(new.tolist())[1:-1]
            kept.digest = zlib.crc32(np.ascontiguousarray(new, "<i4").tobytes(), kept.digest)
            kept.count, kept.last = len(tokens), int(tokens[-1])
            self.totals.encoded_tokens += len(new)

    def _check_range(self, tokens: TokenColumn) -> None:
        if not len(tokens):
            raise EndpointRefused("complete(tokens): got no ids; expected at least one")
        limit = self.vocab_size
        wrong = (tokens < 0) | (tokens >= limit) if limit is not None else tokens < 0
        if wrong.any():
            position = int(wrong.argmax())
            # Not one rollout's failure: the tokenizer is not this model's, and the next request would be wrong as well.
            raise ConfigError.of(f"token {position} of {len(tokens)}", int(tokens[position]), f"an id below {limit}")

    # -- what is it --

    async def describe(self) -> ServerInfo:
        """See :class:`rollouts.inference.base.Policy`."""
        with boundary(EndpointUnavailable, "asking the server what it is", seconds=_DESCRIBE_SECONDS):
            infos = [await self._describe(url) for url in self.endpoint.base_url]
        models = sorted({str(info.model) for info in infos})
        if len(models) > 1:
            raise ConfigError.of("Endpoint.base_url", models, "workers that serve one model")
        contexts = [info.max_context for info in infos if info.max_context is not None]
        return attrs.evolve(infos[0], max_context=min(contexts) if contexts else None)

    async def _describe(self, url: str) -> ServerInfo:
        model = await self._ask(url, "/model_info", "/get_model_info")
        if model is None or "model_path" not in model:
            raise EndpointRefused(f"{url}: got {model!r} for /model_info; expected an SGLang server, with model_path")
        server = await self._ask(url, "/server_info", "/get_server_info") or {}
        listed = (await self._ask(url, "/v1/models") or {}).get("data")
        entry = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
        context = entry.get("max_model_len")
        return ServerInfo(
            version=_text(server.get("version")),
            model=_text(model["model_path"]),
            weight_version=_text(model.get("weight_version")),
            max_context=context if isinstance(context, int) and context > 0 else None,
        )

    async def _ask(self, url: str, *paths: str) -> dict[str, Any] | None:
        """The first of some paths that answers with an object; ``None`` if none is there."""
        answer: Answer | None = None
        for path in paths:
            try:
                answer = await self._transport.send("GET", url + path)
            except (NotSentError, LostError) as error:
                raise EndpointUnavailable(f"{url}: nobody answers there ({error}); is the server up?") from error
            if answer.status != 404:
                break
        assert answer is not None
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise error_of(answer, url + paths[0])
        try:
            value = msgspec.json.decode(answer.body)
        except msgspec.MsgspecError:
            value = None
        if not isinstance(value, dict):
            start = answer.body[:80].decode(errors="replace")
            raise EndpointRefused(f"{url}{paths[0]}: got {start!r}; expected the JSON of an SGLang server")
        return value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


_SHARED: weakref.WeakKeyDictionary[AbstractEventLoop, dict[tuple[Endpoint, int | None], SGLangPolicy]] = (
    weakref.WeakKeyDictionary()
)


def shared_policy(endpoint: Endpoint, *, vocab_size: int | None = None) -> SGLangPolicy:
    """The one policy of this event loop for an endpoint; its connections close when the loop does."""
    policies = _SHARED.setdefault(get_running_loop(), {})
    return policies.setdefault((endpoint, vocab_size), SGLangPolicy(endpoint, vocab_size=vocab_size))
