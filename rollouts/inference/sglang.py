"""A policy that samples from SGLang servers.

Invariant: for one call of :meth:`SGLangPolicy.complete` at most one generation may be running anywhere. Each attempt
has a rid of its own; before the next one is sent, the one before was answered, cannot have reached its server, or its
abort was acknowledged. A call that ends in any other way (cancelled, too late, given up) aborts what it leaves behind.

This module knows tokens only: no message, no environment, no sample.
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
from rollouts.inference.aborts import abort_generation
from rollouts.inference.base import ServerInfo
from rollouts.inference.discovery import describe_server, merged
from rollouts.inference.limiter import AdaptiveLimit, Limiter, read_load
from rollouts.inference.pauses import LOOK_SECONDS, is_ready
from rollouts.inference.routing import Worker, Workers
from rollouts.inference.token_json import EncodedIds, SequenceCache
from rollouts.inference.wire_errors import MayStillRun, error_of, loads, message_of

__all__ = ["SGLangPolicy", "Totals", "full_jitter", "shared_policies", "shared_policy"]

DESCRIBE_SECONDS = 30.0
LOAD_SECONDS = 2.0
ABORTS_AT_ONCE = 64
_LONG_REPLY = 1 << 16
"""Bytes of a reply (some 1,600 tokens) from which on it waits for its turn to be read."""


def full_jitter(failures: int) -> float:
    """Seconds to wait after so many failed attempts: evenly spread below a bound that doubles from 0.5 s to 15 s."""
    return _RANDOM.uniform(0.0, min(15.0, 0.5 * 2.0 ** min(failures - 1, 10)))


_RANDOM = random.Random()  # our own, so that no user's seeded stream moves with the network


@attrs.define
class Totals:
    """What a policy did so far."""

    requests: int = 0
    """Sent to ``/generate``, retries included."""
    retries: int = 0
    aborts: int = 0
    """Aborts that a server acknowledged."""
    completions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    encoded_tokens: int = 0
    """Prompt ids that were written as JSON: those that were new since their session's last call."""


@attrs.define(eq=False)
class _Call:
    """One call of complete, over all its attempts."""

    ids: EncodedIds
    options: bytes
    headers: dict[str, str]
    session: str
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    began: float = attrs.field(factory=time.monotonic)
    running: tuple[Worker, str] | None = None
    """Where a generation of this call may be running, and its rid. Nothing is sent while this is set."""
    last: EndpointUnavailable | None = None


class SGLangPolicy:
    """Samples from one or several SGLang servers of the same model (protocol :class:`~rollouts.inference.base.Policy`).

    Opens its connections at first use and closes them with the event loop, with :meth:`aclose`, or at the end of an
    ``async with`` block. Belongs to one event loop at a time.

    Args:
        endpoint: where, with which key, deadlines and number of retries. Its ``sampling`` is not read here.
        vocab_size: ids at or above it are never sent (a real server dies of them), and a reply that has one is refused.
            ``None`` if it is not known.
        backoff: seconds to wait after the given number of failed attempts, from 1.
    """

    def __init__(
        self, endpoint: Endpoint, *, vocab_size: int | None = None, backoff: Callable[[int], float] = full_jitter
    ) -> None:
        key = endpoint.api_key
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("Endpoint.api_key: holds characters that cannot stand in a header")
        self.endpoint = endpoint
        self.totals = Totals()
        self.on_completion: Callable[[Completion, str], None] | None = None
        """Is told every completion, and the server that it came from."""
        self._backoff = backoff
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._sequences = SequenceCache(vocab_size)
        self._workers = Workers([_worker(url, endpoint.concurrency) for url in endpoint.base_url])
        self._transport = HttpClient(connect_seconds=endpoint.connect_seconds)
        self._sound_stops: set[tuple[int, ...]] = set()
        self._last_options: tuple[SamplingParams | None, tuple[int, ...], bytes] = (None, (), b"")
        self._one_long_reply = anyio.Lock(fast_acquire=True)
        self._running: dict[str, Worker] = {}
        """By rid, what was sent and is not answered yet."""

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
        """Requests that wait for an answer now."""
        return self._workers.in_flight

    @property
    def waiting(self) -> int:
        """Requests that wait for a place at their server."""
        return sum(worker.limiter.waiting for worker in self._workers.all)

    @property
    def moved(self) -> int:
        """Sessions that left a server which had far more to do than another."""
        return self._workers.moved

    async def __aenter__(self) -> SGLangPolicy:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; a later call opens them anew."""
        await self._transport.aclose()

    async def complete(
        self, tokens: TokenColumn, sampling: SamplingParams, *, stop_token_ids: tuple[int, ...] = (), session: str = ""
    ) -> Completion:
        """Sample one continuation of ``tokens``.

        Args:
            tokens: ids, shape ``(n,)``, n >= 1; sent as they are.
            sampling: how to sample; ``max_new_tokens`` is the budget of this reply.
            stop_token_ids: ids that end the reply, in addition to the model's own.
            session: names the sequence; its calls go to one worker, and only what it has grown by is encoded.

        Raises:
            EndpointUnavailable: no answer worth keeping within ``request_seconds`` and ``max_retries``.
            EndpointRefused: the server will not serve this request, or its reply is none that could be trained.
            ContextOverflow: prompt and budget do not fit the model's context.
            ConfigError: an id is not one of the vocabulary; nothing was sent.
            TokenMismatchError: the answer is not about the ids that were sent.
        """
        if stop_token_ids not in self._sound_stops:
            self._sequences.check(stop_token_ids, "stop_token_ids")
            self._sound_stops = {tuple(stop_token_ids)}
        call = _Call(
            ids=self._sequences.encode(tokens, session),  # nobody else holds the text: see move_into
            options=self._options(sampling, stop_token_ids),
            headers={**self._headers, "X-SMG-Routing-Key": _header_safe(session)} if session else self._headers,
            session=session,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
        )
        self.totals.encoded_tokens = self._sequences.encoded
        worker = self._workers.of(session)
        try:
            with boundary(EndpointUnavailable, f"POST {worker.name}/generate", seconds=self.endpoint.request_seconds):
                return await self._attempts(call, worker)
        except EndpointUnavailable as error:
            if error.__cause__ is None and call.last not in (None, error):
                raise error from call.last  # too late: say what went wrong before
            raise
        finally:
            call.last = None  # its traceback holds the call: nothing but a collector would free the two

    def _options(self, sampling: SamplingParams, stop_token_ids: tuple[int, ...]) -> bytes:
        """What stands behind the ids; made again only where it differs from the call before."""
        known_sampling, known_stops, options = self._last_options
        if sampling is not known_sampling or stop_token_ids is not known_stops:
            options = generate_wire.request_options(sampling, stop_token_ids)
            self._last_options = (sampling, stop_token_ids, options)
        return options

    async def interrupt(self) -> None:
        """Abort what is in flight, each by its rid: it is answered at once with what it has; nobody else's is touched.

        A request that has not reached its server yet is not known there: call again while one is in flight.
        """
        limiter = anyio.CapacityLimiter(ABORTS_AT_ONCE)

        async def abort(rid: str, worker: Worker) -> None:
            async with limiter:
                try:
                    await abort_generation(self._transport, worker.url, rid, self._headers)
                except EndpointUnavailable:
                    return  # its own call finds out what became of it
                self.totals.aborts += 1

        async with anyio.create_task_group() as aborts:
            for rid, worker in list(self._running.items()):
                aborts.start_soon(abort, rid, worker)

    async def look_for_pauses(self) -> None:
        """See which of the servers that keep turns waiting are paused; a server that does not say is not."""
        for worker in self._workers.all:
            quiet = worker.in_flight and time.monotonic() - worker.answered > LOOK_SECONDS
            if quiet or worker.pause.is_on:
                worker.pause.seen(await is_ready(self._transport, worker.url, self._headers) is False)

    async def describe(self) -> ServerInfo:
        """Ask the servers what they are. Several are asked in turn: what they agree on, and the shortest context.

        Raises:
            EndpointUnavailable: nobody answers at one of the URLs.
            EndpointRefused: somebody answers who does not speak the protocol, or who wants another key.
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
                        await self._settle(call, call.running)
                    if worker.limiter.limit == math.inf:
                        return await self._send(call, worker, fresh=fresh)
                    return await self._send_paced(call, worker, fresh=fresh)
                except generate_wire.BrokenNumbers:
                    raise
                except EndpointUnavailable as error:
                    call.last = error
                    fresh = isinstance(error, ConnectionLost)
                    if isinstance(error, ConnectionLost) and error.stale and not replaced:
                        replaced = True  # the server had closed a kept connection: no fault of this attempt
                    else:
                        failures += 1
                        if failures > self.endpoint.max_retries:
                            raise EndpointUnavailable(f"gave up after {failures} attempts: {error}") from error
                        failed = worker if call.running is None else call.running[0]  # it may be the abort that failed
                        worker = self._workers.instead_of(failed, call.session)
                        await self._pause(failures, worker)
                self.totals.retries += 1
        finally:
            if call.running is not None:
                with anyio.CancelScope(shield=True):
                    try:
                        await self._settle(call, call.running)
                    except EndpointUnavailable as error:
                        call.last = error  # the server ends it by itself once it sees that we are gone

    async def _send_paced(self, call: _Call, worker: Worker, *, fresh: bool) -> Completion:
        """Send once the server has a place for it."""
        await self._look(worker)
        async with worker.limiter.place():
            completion = await self._send(call, worker, fresh=fresh)
        await self._look(worker)
        return completion

    async def _look(self, worker: Worker) -> None:
        """Ask a server for its load, if it is time to: one request in a second does so for all."""
        if worker.adaptive_limit is None or not worker.adaptive_limit.claim_look():
            return
        try:
            with anyio.move_on_after(LOAD_SECONDS):
                status, payload = await self._transport.get(f"{worker.url}/v1/loads?include=core", self._headers)
                worker.adaptive_limit.seen(read_load(loads(payload)) if status == 200 else None)
                return
        except EndpointUnavailable:
            pass  # whoever sends a request there finds out
        finally:
            worker.adaptive_limit.unseen()

    async def _send(self, call: _Call, worker: Worker, *, fresh: bool) -> Completion:
        rid = os.urandom(16).hex()  # of fixed width, as no rid may be the beginning of another: SGLang aborts by prefix
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
                # Many long replies that arrive at once are read one in each turn of the loop, not all in one.
                async with self._one_long_reply:
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

    async def _pause(self, failures: int, worker: Worker) -> None:
        with boundary(EndpointUnavailable, f"pause after {failures} failed attempts at {worker.name}"):
            await anyio.sleep(self._backoff(failures))

    async def _settle(self, call: _Call, running: tuple[Worker, str]) -> None:
        """Make sure that no generation of this call is running; raises EndpointUnavailable if that cannot be known."""
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
        if key and key in str(error):  # a server may echo what it was sent
            error.args = (str(error).replace(key, "***"),)


_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Endpoint, int | None], SGLangPolicy]] = (
    weakref.WeakKeyDictionary()
)


def shared_policy(endpoint: Endpoint, vocab_size: int | None = None) -> SGLangPolicy:
    """The policy of this endpoint in the running event loop: one pool, however often it is asked for.

    Endpoints that differ only in their sampling share it. It is closed when the loop shuts down.

    Raises:
        RuntimeError: no event loop is running.
    """
    mine = _SHARED.setdefault(asyncio.get_running_loop(), {})
    key = (attrs.evolve(endpoint, sampling=_ANY_SAMPLING), vocab_size)
    policy = mine.get(key)
    if policy is None:
        policy = mine[key] = SGLangPolicy(endpoint, vocab_size=vocab_size)
    return policy


def shared_policies() -> list[SGLangPolicy]:
    """Those that were asked for in the running event loop."""
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
