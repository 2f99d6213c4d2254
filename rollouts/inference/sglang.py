"""Policy that samples from SGLang servers.

Invariant: one call of :meth:`SGLangPolicy.complete` runs at most one generation at a time on all servers. Each attempt
has its own rid. The next attempt is sent only after the previous one was answered, did not reach its server, or its
abort was acknowledged. A call that is cancelled, late or out of retries aborts its generation.

This module knows tokens, but no messages, environments or samples.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from urllib.parse import quote

import anyio
import anyio.lowlevel
import attrs

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Completion, Concurrency, Endpoint, SamplingParams, TokenColumn, without_password
from rollouts.errors import ConfigError, ContextOverflow, EndpointError, EndpointRefused, EndpointUnavailable
from rollouts.http.client import ConnectFailed, ConnectionLost, HttpClient
from rollouts.inference import generate_wire
from rollouts.inference.aborts import abort_generation, abort_until_idle
from rollouts.inference.base import ServerInfo
from rollouts.inference.discovery import describe_server, merged
from rollouts.inference.limiter import AdaptiveLimit, Limiter, read_load
from rollouts.inference.pauses import POLL_SECONDS, is_ready
from rollouts.inference.routing import Worker, Workers
from rollouts.inference.token_json import EncodedIds, SequenceCache
from rollouts.inference.wire_errors import MayStillRun, error_of, loads, message_of

__all__ = ["SGLangPolicy", "Totals", "full_jitter", "shared_policies", "shared_policy"]

DESCRIBE_SECONDS = 30.0
LOAD_SECONDS = 2.0
MAX_CONCURRENT_ABORTS = 64
_LONG_REPLY = 1 << 16
"""Bytes (some 1,600 tokens) from which on a response is decoded alone in its loop iteration."""


def full_jitter(failures: int) -> float:
    """Return a random backoff in seconds: uniform below a bound that doubles from 0.5 s to 15 s."""
    return _RANDOM.uniform(0.0, min(15.0, 0.5 * 2.0 ** min(failures - 1, 10)))


_RANDOM = random.Random()  # not the global generator, whose seeded stream belongs to the user


@attrs.define
class Totals:
    """Counters of a policy."""

    requests: int = 0
    """Requests sent to ``/generate``, including retries."""
    retries: int = 0
    aborts: int = 0
    """Aborts that a server acknowledged."""
    completions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    encoded_tokens: int = 0
    """Prompt ids encoded as JSON: those that were new since the last call of their session."""


@attrs.define(eq=False)
class _Call:
    """State of one call of ``complete`` over all its attempts."""

    ids: EncodedIds
    options: bytes
    headers: dict[str, str]
    session: str
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    began: float = attrs.field(factory=time.monotonic)
    running: tuple[Worker, str] | None = None
    """Worker and rid of a generation that may be running; no attempt is sent while this is set."""
    last_error: EndpointUnavailable | None = None


class SGLangPolicy:
    """Samples from one or several SGLang servers of the same model (protocol :class:`~rollouts.inference.base.Policy`).

    Opens its connections at first use and closes them with the event loop, with :meth:`aclose`, or at the end of an
    ``async with`` block. Belongs to one event loop at a time.

    Args:
        endpoint: URLs, key, deadlines and number of retries; its ``sampling`` is ignored.
        vocab_size: upper bound of ids, ``None`` if unknown. Other ids are not sent (they would crash the server), and a
            reply that contains one is refused.
        backoff: maps the number of failed attempts (from 1) to the seconds before the next one.
    """

    def __init__(
        self, endpoint: Endpoint, *, vocab_size: int | None = None, backoff: Callable[[int], float] = full_jitter
    ) -> None:
        key = endpoint.api_key
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("Endpoint.api_key: contains characters that are not allowed in a header")
        self.endpoint = endpoint
        self.totals = Totals()
        self.on_completion: Callable[[Completion, str], None] | None = None
        """Called with every completion and the name of its server."""
        self._backoff = backoff
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._sequences = SequenceCache(vocab_size)
        self._workers = Workers([_worker(url, endpoint.concurrency) for url in endpoint.base_url])
        self._transport = HttpClient(connect_seconds=endpoint.connect_seconds)
        self._checked_stops: set[tuple[int, ...]] = set()
        self._last_options: tuple[SamplingParams | None, tuple[int, ...], bytes] = (None, (), b"")
        self._long_reply_lock = anyio.Lock(fast_acquire=True)
        self._running: dict[str, Worker] = {}
        """Workers of the requests in flight, by rid."""

    def __repr__(self) -> str:
        urls = ", ".join(worker.name for worker in self._workers.all)
        done = self.totals
        return (
            f"<SGLangPolicy {urls}: {self._workers.in_flight} in flight; {done.completions} completions"
            f" from {done.requests} requests, {done.retries} retries, {done.aborts} aborts; tokens:"
            f" {done.prompt_tokens} prompt ({done.cached_tokens} cached), {done.sampled_tokens} sampled>"
        )

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered yet."""
        return self._workers.in_flight

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot of their server."""
        return sum(worker.limiter.waiting for worker in self._workers.all)

    @property
    def moved(self) -> int:
        """Sessions moved to another server because of skewed load."""
        return self._workers.moved

    async def __aenter__(self) -> SGLangPolicy:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; a later call opens new ones."""
        await self._transport.aclose()

    async def complete(
        self, tokens: TokenColumn, sampling: SamplingParams, *, stop_token_ids: tuple[int, ...] = (), session: str = ""
    ) -> Completion:
        """Sample one continuation of ``tokens``.

        Args:
            tokens: prompt ids, shape ``(n,)``, n >= 1; sent unchanged.
            sampling: sampling parameters; ``max_new_tokens`` limits this reply.
            stop_token_ids: ids that end the reply, in addition to the model's own.
            session: name of the sequence; its calls go to one worker, and only new ids are encoded.

        Raises:
            EndpointUnavailable: no valid response within ``request_seconds`` and ``max_retries``.
            EndpointRefused: the server refuses this request, or its reply cannot be trained.
            ContextOverflow: prompt and ``max_new_tokens`` exceed the model's context.
            ConfigError: an id is outside the vocabulary; nothing was sent.
            TokenMismatchError: the response is not about the ids that were sent.
        """
        if stop_token_ids not in self._checked_stops:
            self._sequences.check(stop_token_ids, "stop_token_ids")
            self._checked_stops = {tuple(stop_token_ids)}
        call = _Call(
            ids=self._sequences.encode(tokens, session),  # not kept in a variable: see move_into
            options=self._options(sampling, stop_token_ids),
            headers={**self._headers, "X-SMG-Routing-Key": _header_safe(session)} if session else self._headers,
            session=session,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
        )
        self.totals.encoded_tokens = self._sequences.encoded
        worker = self._workers.worker_for(session)
        try:
            with boundary(EndpointUnavailable, f"POST {worker.name}/generate", seconds=self.endpoint.request_seconds):
                return await self._attempts(call, worker)
        except EndpointUnavailable as error:
            if error.__cause__ is None and call.last_error not in (None, error):
                raise error from call.last_error  # deadline: attach the error of the last attempt
            raise
        finally:
            call.last_error = None  # breaks the reference cycle through its traceback

    def _options(self, sampling: SamplingParams, stop_token_ids: tuple[int, ...]) -> bytes:
        """Encode the options; those of the last call are reused if they are the same objects."""
        last_sampling, last_stops, options = self._last_options
        if sampling is not last_sampling or stop_token_ids is not last_stops:
            options = generate_wire.request_options(sampling, stop_token_ids)
            self._last_options = (sampling, stop_token_ids, options)
        return options

    async def interrupt(self) -> None:
        """Abort the requests in flight by rid; each is answered at once with the tokens sampled so far.

        A server does not know a request that has not arrived yet: call again while one is in flight.
        """
        limiter = anyio.CapacityLimiter(MAX_CONCURRENT_ABORTS)

        async def abort(rid: str, worker: Worker) -> None:
            async with limiter:
                try:
                    await abort_generation(self._transport, worker.url, rid, self._headers)
                except EndpointUnavailable:
                    return  # the call itself handles the failure
                self.totals.aborts += 1

        async with anyio.create_task_group() as aborts:
            for rid, worker in list(self._running.items()):
                aborts.start_soon(abort, rid, worker)

    async def abort_all(self, seconds: float) -> None:
        """Abort the requests of everyone on all servers until none is left.

        Raises:
            EndpointUnavailable: a server does not respond, or is still not idle after ``seconds``.
        """
        for worker in self._workers.all:
            await abort_until_idle(self._transport, worker.url, self._headers, seconds=seconds)

    async def look_for_pauses(self) -> None:
        """Poll the servers that keep turns waiting for a pause; no answer counts as not paused."""
        for worker in self._workers.all:
            waiting = worker.in_flight and time.monotonic() - worker.answered > POLL_SECONDS
            if waiting or worker.pause.is_on:
                worker.pause.detected(await is_ready(self._transport, worker.url, self._headers) is False)

    async def describe(self) -> ServerInfo:
        """Query all servers in turn: the fields on which they agree, and the shortest context.

        Raises:
            EndpointUnavailable: no server answers at one of the URLs.
            EndpointRefused: a server does not implement the protocol, or rejects the key.
        """
        infos = []
        for worker in self._workers.all:
            with boundary(EndpointUnavailable, f"GET {worker.name}/model_info", seconds=DESCRIBE_SECONDS):
                try:
                    infos.append(await describe_server(self._transport, worker.url, self._headers))
                except EndpointError as error:
                    self._hide_key(error)
                    raise
        return merged(infos)

    async def _attempts(self, call: _Call, worker: Worker) -> Completion:
        failures, replaced, fresh = 0, False, False
        try:
            while True:
                try:
                    if call.running is not None:
                        await self._abort_running(call, call.running)
                    if worker.limiter.limit == math.inf:
                        return await self._send(call, worker, fresh=fresh)
                    return await self._send_limited(call, worker, fresh=fresh)
                except generate_wire.BrokenNumbers:
                    raise
                except EndpointUnavailable as error:
                    call.last_error = error
                    fresh = isinstance(error, ConnectionLost)
                    if isinstance(error, ConnectionLost) and error.stale and not replaced:
                        replaced = True  # the server had closed an idle connection: not a failed attempt
                    else:
                        failures += 1
                        if failures > self.endpoint.max_retries:
                            raise EndpointUnavailable(f"gave up after {failures} attempts: {error}") from error
                        failed = worker if call.running is None else call.running[0]  # the abort may have failed
                        worker = self._workers.reassign(failed, call.session)
                        await self._back_off(failures, worker)
                self.totals.retries += 1
        finally:
            if call.running is not None:
                with anyio.CancelScope(shield=True):
                    try:
                        await self._abort_running(call, call.running)
                    except EndpointUnavailable as error:
                        call.last_error = error  # the server aborts it once it notices the closed connection

    async def _send_limited(self, call: _Call, worker: Worker, *, fresh: bool) -> Completion:
        """Send within the limit of the server."""
        await self._query_load(worker)
        async with worker.limiter.slot():
            completion = await self._send(call, worker, fresh=fresh)
        await self._query_load(worker)
        return completion

    async def _query_load(self, worker: Worker) -> None:
        """Query the load of a server if it is due: one request a second does so for all."""
        if worker.adaptive_limit is None or not worker.adaptive_limit.claim_query():
            return
        try:
            with anyio.move_on_after(LOAD_SECONDS):
                status, payload = await self._transport.get(f"{worker.url}/v1/loads?include=core", self._headers)
                worker.adaptive_limit.update(read_load(loads(payload)) if status == 200 else None)
                return
        except EndpointUnavailable:
            pass  # the next request to this server reports it
        finally:
            worker.adaptive_limit.end_query()

    async def _send(self, call: _Call, worker: Worker, *, fresh: bool) -> Completion:
        rid = os.urandom(16).hex()  # fixed width, so that none is a prefix of another: SGLang aborts by prefix
        body, start = generate_wire.request_body(rid, call.ids, call.options)
        call.ids.move_into(body, start)
        call.running = (worker, rid)
        self.totals.requests += 1
        worker.in_flight += 1
        self._running[rid] = worker
        clocks = worker.pause.entered()
        try:
            status, payload = await self._transport.post(f"{worker.url}/generate", body, call.headers, fresh=fresh)
        except ConnectFailed:
            call.running = None
            worker.suspect()
            raise
        except ConnectionLost:
            worker.suspect()
            raise
        finally:
            worker.pause.left(clocks)
            worker.in_flight -= 1
            del self._running[rid]
        try:
            if status != 200:
                error = error_of(status, f"{message_of(payload)} (POST {worker.name}/generate)")
                if not isinstance(error, MayStillRun):
                    call.running = None
                raise error
            call.running = None
            seconds = time.monotonic() - call.began
            if len(payload) >= _LONG_REPLY:
                # Of long responses that arrive together, decode one in each loop iteration.
                async with self._long_reply_lock:
                    await anyio.lowlevel.checkpoint()
            completion = generate_wire.read_completion(
                payload,
                rid=rid,
                ids=call.ids,
                stop=call.sampling.stop,
                seconds=seconds,
                vocab_size=self._sequences.vocab_size,
            )
            generate_wire.check_obeyed(completion, call.sampling, call.stop_token_ids)
        except (EndpointUnavailable, EndpointRefused, ContextOverflow) as error:
            self._hide_key(error)
            raise
        worker.suspect_until, worker.answered = 0.0, call.began + seconds
        self.totals.completions += 1
        self.totals.prompt_tokens += completion.prompt_tokens
        self.totals.cached_tokens += completion.cached_tokens
        self.totals.sampled_tokens += len(completion.tokens)
        if self.on_completion is not None:
            self.on_completion(completion, worker.name)
        return completion

    async def _back_off(self, failures: int, worker: Worker) -> None:
        with boundary(EndpointUnavailable, f"pause after {failures} failed attempts at {worker.name}"):
            await anyio.sleep(self._backoff(failures))

    async def _abort_running(self, call: _Call, running: tuple[Worker, str]) -> None:
        """Abort the generation of this call; raises EndpointUnavailable if it may still be running."""
        worker, rid = running
        try:
            await abort_generation(self._transport, worker.url, rid, self._headers)
        except EndpointUnavailable as error:
            self._hide_key(error)
            raise
        call.running = None
        self.totals.aborts += 1

    def _hide_key(self, error: EndpointError) -> None:
        key = self.endpoint.api_key
        if key and key in str(error):  # a server may echo request headers
            error.args = (str(error).replace(key, "***"),)


_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Endpoint, int | None], SGLangPolicy]] = (
    weakref.WeakKeyDictionary()
)


def shared_policy(endpoint: Endpoint, vocab_size: int | None = None) -> SGLangPolicy:
    """Return the policy of this endpoint in the running event loop, created at the first call.

    Endpoints that differ only in their sampling share one policy. It is closed when the loop shuts down.

    Raises:
        RuntimeError: no event loop is running.
    """
    policies = _SHARED.setdefault(asyncio.get_running_loop(), {})
    key = (attrs.evolve(endpoint, sampling=_ANY_SAMPLING), vocab_size)
    policy = policies.get(key)
    if policy is None:
        policy = policies[key] = SGLangPolicy(endpoint, vocab_size=vocab_size)
    return policy


def shared_policies() -> list[SGLangPolicy]:
    """Return all shared policies of the running event loop."""
    return list(_SHARED.get(asyncio.get_running_loop(), {}).values())


_ANY_SAMPLING = SamplingParams()


def _worker(url: str, concurrency: Concurrency) -> Worker:
    limiter = Limiter(concurrency if isinstance(concurrency, int) else math.inf)
    return Worker(
        url,
        without_password(url),
        limiter=limiter,
        adaptive_limit=AdaptiveLimit(limiter) if concurrency == "adaptive" else None,
    )


def _header_safe(session: str) -> str:
    return session if session.isascii() and session.isprintable() else quote(session, safe="")
