"""Policy that samples from servers over HTTP: retries, aborts, outages, pauses; a subclass knows the protocol.

Invariant: one call of :meth:`ServerPolicy.complete` runs at most one generation at a time on all servers. Each attempt
has its own rid. The next attempt is sent only after the previous one was answered, did not reach its server, or its
abort was acknowledged. A call that is cancelled, late or out of retries aborts its generation.

This module knows tokens, but no messages, environments or samples, and no server's format.
"""

from __future__ import annotations

import abc
import functools
import logging
import math
import os
import random
import time
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import ClassVar, Self, TypeAlias
from urllib.parse import quote

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
import numpy as np

from rollouts.concurrency.boundary import boundary
from rollouts.concurrency.deadlines import paused_deadlines
from rollouts.dtypes import (
    Completion,
    Concurrency,
    Endpoint,
    ImageSpan,
    SamplingParams,
    TokenColumn,
    without_password,
)
from rollouts.errors import ContextOverflow, EndpointError, EndpointRefused, EndpointUnavailable
from rollouts.http.client import ConnectFailed, ConnectionLost, HttpClient
from rollouts.inference.aborts import AbortRoutes, abort_generation, abort_until_idle, headers_of
from rollouts.inference.base import ExtrasRequest, ServerInfo, check_takes_images
from rollouts.inference.completions import BrokenNumbers, SentRequest, check_obeyed, most_response_bytes
from rollouts.inference.discovery import merged
from rollouts.inference.image_json import ImageTexts, collapsed
from rollouts.inference.limiter import AdaptiveLimit
from rollouts.inference.outages import Outage, ServedWeights, ServerAway
from rollouts.inference.pauses import POLL_SECONDS
from rollouts.inference.prefixes import Namespaces
from rollouts.inference.routing import Worker, Workers
from rollouts.inference.token_json import EncodedIds, SequenceCache
from rollouts.inference.wire_errors import MayStillRun, Overloaded, error_of, message_of

__all__ = ["ServerPolicy", "Totals", "VocabSize", "full_jitter"]

VocabSize: TypeAlias = int | Callable[[], int] | None
"""Number of ids of the model, or a hashable function that returns it."""

_LOG = logging.getLogger(__name__)

DESCRIBE_SECONDS = 30.0
LOAD_SECONDS = 2.0
MAX_CONCURRENT_ABORTS = 64
_CRASH_SECONDS = 1.0
"""A request takes longer than this to crash its server: an id outside the vocabulary took 65 s."""
_LONG_REPLY = 1 << 16
"""Bytes (some 1,600 tokens) from which on a response is decoded alone in its loop iteration."""
_LARGE_REPLY = 1 << 20
"""Bytes from which on a response with extras is decoded in a thread: routed experts take megabytes."""


def full_jitter(failures: int) -> float:
    """Return a random backoff in seconds: uniform below a bound that doubles from 0.5 s to 15 s."""
    return _RANDOM.uniform(0.0, min(15.0, 0.5 * 2.0 ** min(failures - 1, 10)))


_RANDOM = random.Random()  # not the global generator, whose seeded stream belongs to the user


@attrs.define
class Totals:
    """Counters of a policy."""

    requests: int = 0
    """Requests for a completion, including retries."""
    retries: int = 0
    aborts: int = 0
    """Aborts that a server acknowledged."""
    completions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    encoded_tokens: int = 0
    """Prompt ids encoded as JSON: those that were new since the last call of their session."""
    encoded_images: int = 0
    """Images encoded as JSON: each once."""


@attrs.define(eq=False)
class _Call:
    """State of one call of ``complete`` over all its attempts."""

    ids: EncodedIds
    options: bytes
    headers: dict[str, str]
    route: str
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    namespace: str
    extras: ExtrasRequest | None
    images: Sequence[bytes]
    """The JSON texts of the images."""
    expanded: TokenColumn | None
    """If there are images, all ids of the prompt."""
    began: float = attrs.field(factory=time.monotonic)
    running: tuple[Worker, str] | None = None
    """Worker and rid of a generation that may be running; no attempt is sent while this is set."""
    last_error: EndpointError | None = None
    holds: int = 0
    """Waits for a server."""
    alone: bool = False
    """Whether the lost request was the only new one of its server."""
    deaths: int = 0
    """Deaths of servers while it was."""
    only: Worker | None = None
    """The only worker that may get this call again: it died of it, perhaps."""
    died: float = 0.0
    """``time.monotonic()`` of its death."""


class ServerPolicy(abc.ABC):
    """Samples from one or several servers of the same model (protocol :class:`~rollouts.inference.base.Policy`).

    Opens its connections at first use and closes them with the event loop, with :meth:`aclose`, or at the end of an
    ``async with`` block. Belongs to one event loop at a time.

    Args:
        endpoint: URLs, key, deadlines and number of retries; its ``sampling`` is ignored.
        vocab_size: upper bound of ids, ``None`` if unknown. Other ids are not sent (they would crash the server), and a
            reply that contains one is refused. A function is called in a worker thread before the first request.
        backoff: maps the number of failed attempts (from 1) to the seconds before the next one.
        look_seconds: seconds between two looks at a server that is away.
    """

    ROUTE: ClassVar[str]
    """Path to which requests for a completion are sent."""
    ABORTS: ClassVar[AbortRoutes]
    takes_images: ClassVar[bool] = False
    """Whether requests may have images."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        vocab_size: VocabSize = None,
        backoff: Callable[[int], float] = full_jitter,
        look_seconds: float = 1.0,
    ) -> None:
        self.endpoint = endpoint
        self.totals = Totals()
        self.on_completion: Callable[[Completion, str], None] | None = None
        """Called with every completion and the name of its server."""
        self._backoff = backoff
        self._look_seconds = look_seconds
        self._headers, self._admin_headers = headers_of(endpoint), headers_of(endpoint, admin=True)
        self._outage = Outage(endpoint.outage_seconds)
        self._weights = ServedWeights()
        self._namespaces = Namespaces()
        self._reached = False
        """Whether a server has ever answered: a wrong URL is not waited for."""
        self._interrupted = anyio.Event()
        self._unread_vocab_size = vocab_size if callable(vocab_size) else None
        self._reading_lock = anyio.Lock()
        self._sequences = SequenceCache(None if callable(vocab_size) else vocab_size)
        self._images = ImageTexts()
        self._workers = Workers([_worker(url, endpoint.concurrency) for url in endpoint.base_url])
        self._transport = HttpClient(connect_seconds=endpoint.connect_seconds)
        self._checked_stops: set[tuple[int, ...]] = set()
        self._last_options: tuple[object, bytes] = None, b""
        self._long_reply_lock = anyio.Lock(fast_acquire=True)
        self._running: dict[str, Worker] = {}
        """Workers of the requests in flight, by rid."""

    def __repr__(self) -> str:
        urls = ", ".join(worker.name for worker in self._workers.all)
        done = self.totals
        return (
            f"<{type(self).__name__} {urls}: {self._workers.in_flight} in flight; {done.completions} completions"
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
        return sum(worker.waiting for worker in self._workers.all)

    @property
    def moved(self) -> int:
        """Sessions moved to another server because of skewed load."""
        return self._workers.moved

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; a later call opens new ones."""
        await self._transport.aclose()

    async def complete(
        self,
        tokens: TokenColumn,
        sampling: SamplingParams,
        *,
        stop_token_ids: tuple[int, ...] = (),
        session: str = "",
        route: str = "",
        extras: ExtrasRequest | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Completion:
        """Sample one continuation of ``tokens``.

        Args:
            tokens: prompt ids, shape ``(n,)``, n >= 1; sent unchanged.
            sampling: sampling parameters; ``max_new_tokens`` limits this reply.
            stop_token_ids: ids that end the reply, in addition to the model's own.
            session: name of the sequence; only new ids are encoded.
            route: name of sequences that share a beginning; their calls go to one worker. By default the session.
            extras: what the completion needs beyond tokens and logprobs; a reply without it is refused.
            images: all images of ``tokens``, in order. Each is encoded once; see :mod:`rollouts.inference.image_json`.

        Raises:
            EndpointUnavailable: no valid response within ``request_seconds`` and ``max_retries``.
            EndpointRefused: the server refuses this request, or its reply cannot be trained or is not about these ids.
            ContextOverflow: prompt and ``max_new_tokens`` exceed the model's context.
            ConfigError: an id is outside the vocabulary, or the protocol has no images; nothing was sent.
        """
        if images:
            check_takes_images(self)
        if self._unread_vocab_size is not None:
            await self._read_vocab_size(self._unread_vocab_size)
        if stop_token_ids not in self._checked_stops:
            self._sequences.check(stop_token_ids, "stop_token_ids")
            self._checked_stops = {tuple(stop_token_ids)}
        route = route or session
        call = _Call(
            ids=self._encode(tokens, session, images),  # not kept in a variable: see move_into
            options=self._options(sampling, stop_token_ids, top_p_sets=extras is not None and extras.top_p_sets),
            headers={**self._headers, **self._session_headers(_header_safe(route))} if route else self._headers,
            route=route,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            namespace=self._namespaces.of(session, self._workers.all[0].url),
            extras=extras,
            images=self._images.of([span.image for span in images]),
            expanded=tokens if images else None,
        )
        self.totals.encoded_tokens = self._sequences.encoded
        self.totals.encoded_images = self._images.encoded
        worker = self._workers.worker_for(route)
        try:
            what, seconds = f"POST {worker.name}{self.ROUTE}", self.endpoint.request_seconds
            with boundary(EndpointUnavailable, what, seconds=seconds, shown="the model", kind="generation"):
                return await self._attempts(call, worker)
        except EndpointUnavailable as error:
            if error.__cause__ is None and call.last_error not in (None, error):
                raise error from call.last_error  # deadline: attach the error of the last attempt
            raise
        finally:
            call.last_error = None  # breaks the reference cycle through its traceback

    def _encode(self, tokens: TokenColumn, session: str, images: Sequence[ImageSpan]) -> EncodedIds:
        """The ids as JSON; with images, count and digest are those of all ids, and one placeholder an image is sent."""
        if not images:
            return self._sequences.encode(tokens, session)
        ids = self._sequences.encode(collapsed(tokens, images), session)
        digest = zlib.crc32(np.ascontiguousarray(tokens, "<i4").data)
        return EncodedIds(ids.pieces, len(tokens), digest)

    async def _read_vocab_size(self, read: Callable[[], int]) -> None:
        async with self._reading_lock:
            if self._unread_vocab_size is not None:  # else a concurrent call was first
                vocab_size = await anyio.to_thread.run_sync(read)
                self._sequences, self._unread_vocab_size = SequenceCache(vocab_size), None

    def _options(self, sampling: SamplingParams, stop_token_ids: tuple[int, ...], *, top_p_sets: bool) -> bytes:
        """Encode the options; those of the last call are reused if they are equal."""
        key = (sampling, stop_token_ids, top_p_sets)
        last, options = self._last_options
        if key != last:  # compares the same objects without looking into them
            options = self._request_options(sampling, stop_token_ids, top_p_sets=top_p_sets)
            self._last_options = key, options
        return options

    async def interrupt(self) -> None:
        """Abort the requests in flight by rid; each is answered at once with the tokens sampled so far.

        Requests that wait for a server are answered without tokens.

        A server does not know a request that has not arrived yet: call again while one is in flight.
        """
        limiter = anyio.CapacityLimiter(MAX_CONCURRENT_ABORTS)
        self._interrupted.set()
        self._interrupted = anyio.Event()

        async def abort(rid: str, worker: Worker) -> None:
            async with limiter:
                try:
                    await abort_generation(self._transport, worker.url, rid, self._admin_headers, self.ABORTS)
                except EndpointUnavailable:
                    return  # the call itself handles the failure
                self.totals.aborts += 1

        async with anyio.create_task_group() as aborts:
            for rid, worker in list(self._running.items()):
                aborts.start_soon(abort, rid, worker)

    async def abort_all(self, seconds: float, *, grace: float = 0.0) -> None:
        """Abort the requests of everyone on all servers until none is left; first give them ``grace`` seconds to end.

        Raises:
            EndpointUnavailable: a server does not respond, or is still not idle after ``seconds``.
        """
        for worker in self._workers.all:
            await abort_until_idle(
                self._transport, worker.url, self._admin_headers, self.ABORTS, seconds=seconds, grace=grace
            )

    async def look_for_pauses(self) -> None:
        """Poll the servers that keep turns waiting for a pause; no answer counts as not paused."""
        for worker in self._workers.all:
            waiting = worker.in_flight and time.monotonic() - worker.answered > POLL_SECONDS
            if waiting or worker.pause.is_on:
                worker.pause.detected(await self._is_ready(worker.url) is False)

    async def describe(self) -> ServerInfo:
        """Query all servers in turn: the fields on which they agree, and the shortest context.

        A server that does not answer is left out with a warning if another one answers.

        Raises:
            EndpointUnavailable: no server answers at any of the URLs.
            EndpointRefused: a server does not implement the protocol, or rejects the key.
            ConfigError: the servers serve different models.
        """
        infos, missing = [], []
        for worker in self._workers.all:
            try:
                infos.append(await self._describe(worker))
            except EndpointUnavailable as error:
                missing.append((worker, error))
        if not infos:
            raise missing[0][1]
        for worker, problem in missing:
            worker.away = True
            worker.suspect()
            _LOG.warning("%d of %d servers answer: %s", len(infos), len(self._workers.all), problem)
        info = merged(infos)
        self._reached = True
        self._weights.described(info)
        return info

    async def check_sampling(self, sampling: SamplingParams) -> None:
        """Check that all servers that answer report the logprobs that a stored token has, for these parameters.

        Raises:
            ConfigError: one does not; nothing was sampled.
        """
        for worker in self._workers.all:
            if not worker.away:
                await self._check_server(worker, sampling)

    async def _describe(self, worker: Worker) -> ServerInfo:
        with boundary(EndpointUnavailable, f"the description of {worker.name}", seconds=DESCRIBE_SECONDS):
            try:
                return await self._describe_server(worker)
            except EndpointError as error:
                self._hide_key(error)
                raise

    async def _attempts(self, call: _Call, worker: Worker) -> Completion:
        failures, replaced, fresh = 0, False, False
        try:
            while True:
                try:
                    if call.running is not None:
                        await self._abort_running(call, call.running)
                    worker = call.only or worker
                    if worker.away:
                        await self._check_return(worker)
                    if worker.limiter.total_tokens == math.inf:
                        return await self._send(call, worker, fresh=fresh)
                    return await self._send_limited(call, worker, fresh=fresh)
                except BrokenNumbers:
                    raise
                except EndpointUnavailable as error:
                    call.last_error = error
                    fresh = isinstance(error, ConnectionLost)
                    if isinstance(error, ConnectionLost) and error.stale and not replaced:
                        replaced = True  # the server had closed an idle connection: not a failed attempt
                    elif isinstance(error, ConnectionLost) and await self._has_died(call):
                        worker = self._workers.reassign(worker, call.route)
                    elif self._is_outage(call, error):
                        held = await self._hold(call, worker, error)
                        if held is None:
                            return _unanswered(call)
                        worker = held
                    else:
                        failures += 1
                        if failures > self.endpoint.max_retries:
                            raise EndpointUnavailable(f"gave up after {failures} attempts: {error}") from error
                        failed = worker if call.running is None else call.running[0]  # the abort may have failed
                        worker = self._workers.reassign(failed, call.route)
                        await self._back_off(failures, worker)
                self.totals.retries += 1
        finally:
            if call.running is not None:
                with anyio.CancelScope(shield=True):
                    try:
                        await self._abort_running(call, call.running)
                    except EndpointError as error:
                        call.last_error = error  # the server aborts it once it notices the closed connection

    async def _has_died(self, call: _Call) -> bool:
        """Whether no server listens any more where a request was lost: that is no failure of the call, either."""
        if call.running is None or not self._reached:
            return False
        worker, _ = call.running
        try:
            await self._abort_running(call, call.running)
        except EndpointUnavailable:
            return False
        return worker.away

    def _is_outage(self, call: _Call, error: EndpointUnavailable) -> bool:
        """Whether an error shows that no server can serve the call now, which is no failure of the call."""
        if call.running is not None and any(not other.away for other in self._workers.all):
            return False  # its abort failed at one server, and others serve
        return self._reached and isinstance(error, ConnectFailed | ServerAway | Overloaded)

    async def _hold(self, call: _Call, worker: Worker, error: EndpointUnavailable) -> Worker | None:
        """Wait until a server may serve the call, with its deadlines paused.

        Returns:
            The worker for the next attempt; ``None`` if the wait was interrupted.

        Raises:
            EndpointAway: no server answered any request of this policy for ``outage_seconds``.
            EndpointRefused: the one server that may get the call did not come back in that time.
        """
        bound = call.only if call.running is None else call.running[0]
        wanted = self._workers.all if bound is None else (bound,)
        full = isinstance(error, Overloaded)
        others_serve = not all(other.away for other in self._workers.all)
        if not full and bound is None and others_serve:
            return self._workers.reassign(worker, call.route)
        reason = f"no server answers at {', '.join(one.name for one in wanted)}"
        if full:
            reason = f"{worker.name} takes no request ({error})"
        interrupted = self._interrupted
        # Where other servers serve, the wait of one call must not keep new groups from starting.
        apart = not full and others_serve
        with paused_deadlines() if apart else self._outage.wait(reason):
            while True:
                if apart:
                    self._raise_if_deadly(call, worker)
                else:
                    self._outage.raise_if_over()
                call.holds += 1
                seconds = min(self._look_seconds, self._backoff(call.holds)) if full else self._look_seconds
                with anyio.move_on_after(seconds):
                    await interrupted.wait()
                if interrupted.is_set() and call.running is None:
                    return None
                if full:
                    return bound or self._workers.reassign(worker, call.route)
                for one in wanted:
                    if not one.away or await self._is_back(one):
                        return bound or self._workers.move(one, call.route)

    def _raise_if_deadly(self, call: _Call, worker: Worker) -> None:
        if time.monotonic() - call.died >= self.endpoint.outage_seconds:
            raise EndpointRefused(
                f"{worker.name} died while this request, of {call.ids.count} ids, was its only new one, and is not back"
                f" after {self.endpoint.outage_seconds:g} s (Endpoint.outage_seconds): no other server gets it"
            )

    async def _is_back(self, worker: Worker) -> bool:
        """Look whether a worker is back; concurrent calls look once for all."""
        now = time.monotonic()
        if now - worker.looked < self._look_seconds / 2:
            return False
        worker.looked = now
        try:
            await self._check_return(worker)
        except ServerAway as error:
            if error.__cause__ is None:  # it is up, with other weights
                self._outage.explain(str(error))
            return False
        return True

    async def _check_return(self, worker: Worker) -> None:
        """Check that a worker that was away serves the right weights again; raises ServerAway if it does not."""
        try:
            self._weights.check(worker.name, await self._describe(worker))
        except ServerAway:
            worker.suspect()
            raise
        except EndpointError as error:
            worker.suspect()
            raise ServerAway(str(error)) from error
        worker.away, worker.suspect_until = False, 0.0
        worker.unanswered.clear()  # of its former process
        self._forget_server(worker)

    async def _send_limited(self, call: _Call, worker: Worker, *, fresh: bool) -> Completion:
        """Send within the limit of the server."""
        await self._query_load(worker)
        async with worker.limiter:
            completion = await self._send(call, worker, fresh=fresh)
        await self._query_load(worker)
        return completion

    async def _query_load(self, worker: Worker) -> None:
        """Query the load of a server if it is due: one request a second does so for all."""
        if worker.adaptive_limit is None or not worker.adaptive_limit.claim_query():
            return
        try:
            with anyio.move_on_after(LOAD_SECONDS):
                status, payload = await self._transport.get(f"{worker.url}{self.ABORTS.load}", self._headers)
                worker.adaptive_limit.update(self.ABORTS.read_load(payload) if status == 200 else None)
                return
        except EndpointUnavailable:
            pass  # the next request to this server reports it
        finally:
            worker.adaptive_limit.end_query()

    async def _send(self, call: _Call, worker: Worker, *, fresh: bool) -> Completion:
        rid = os.urandom(16).hex()  # fixed width, so that none is a prefix of another: SGLang aborts by prefix
        body, start = self._request_body(rid, call.ids, call.options, call.namespace, call.extras, call.images)
        call.ids.move_into(body, start)
        self.totals.requests += 1
        worker.in_flight += 1
        self._running[rid] = worker
        worker.unanswered[rid] = sent = time.monotonic()
        clocks = worker.pause.entered()
        try:
            await self._check_server(worker, call.sampling)
            call.running = (worker, rid)
            size = len(body) - sum(map(len, call.images))
            most = most_response_bytes(size, call.sampling, call.ids.count, call.extras, images=len(call.images))
            url = f"{worker.url}{self.ROUTE}"
            status, payload = await self._transport.post(url, body, call.headers, new_connection=fresh, max_bytes=most)
        except ConnectFailed:
            call.running = None
            worker.unanswered.pop(rid, None)
            worker.away = self._reached
            worker.suspect()
            raise
        except ConnectionLost as lost:
            # A server that was stopped while idle breaks a reused connection at once. A crash takes longer.
            stopped = lost.stale and time.monotonic() - sent < _CRASH_SECONDS
            call.alone = not stopped and worker.is_alone_new(rid)
            worker.suspect()
            raise
        except BaseException:
            worker.unanswered.pop(rid, None)
            raise
        finally:
            worker.pause.left(clocks)
            worker.in_flight -= 1
            del self._running[rid]
        worker.unanswered.pop(rid, None)
        self._reached = True
        try:
            if status != 200:
                error = error_of(status, f"{message_of(payload)} (POST {worker.name}{self.ROUTE})")
                if not isinstance(error, MayStillRun):
                    call.running = None
                raise error
            call.running = None
            waited, seconds = sent - call.began, time.monotonic() - call.began
            if len(payload) >= _LONG_REPLY:
                # Of long responses that arrive together, decode one in each loop iteration.
                async with self._long_reply_lock:
                    await anyio.lowlevel.checkpoint()
            request = SentRequest(
                rid,
                call.ids,
                stop=call.sampling.stop,
                seconds=seconds,
                waited=waited,
                server=worker.name,
                vocab_size=self._sequences.vocab_size,
                extras=call.extras,
                images=len(call.images),
                expanded=call.expanded,
            )
            read = functools.partial(self._read_completion, payload, request)
            large = call.extras is not None and len(payload) >= _LARGE_REPLY
            completion = await anyio.to_thread.run_sync(read) if large else read()
            check_obeyed(completion, call.sampling, call.stop_token_ids)
        except (EndpointUnavailable, EndpointRefused, ContextOverflow) as error:
            self._hide_key(error)
            raise
        worker.suspect_until, worker.answered = 0.0, time.monotonic()
        if len(worker.unanswered) > worker.in_flight:  # some were lost before this answer: the server lives
            worker.unanswered = {rid: sent for rid, sent in worker.unanswered.items() if rid in self._running}
        self._outage.answered()
        if completion.versions:
            self._weights.saw(completion.versions[-1].version)
        self.totals.completions += 1
        self.totals.prompt_tokens += completion.prompt_tokens
        self.totals.cached_tokens += completion.cached_tokens
        self.totals.sampled_tokens += len(completion.tokens)
        if self.on_completion is not None:
            self.on_completion(completion, worker.name)
        return completion

    async def _back_off(self, failures: int, worker: Worker) -> None:
        what = f"pause after {failures} failed attempts at {worker.name}"
        with boundary(EndpointUnavailable, what, kind="a_pause"):
            await anyio.sleep(self._backoff(failures))

    async def _abort_running(self, call: _Call, running: tuple[Worker, str]) -> None:
        """Abort the generation of this call; raises EndpointUnavailable if it may still be running."""
        worker, rid = running
        try:
            is_there = await abort_generation(self._transport, worker.url, rid, self._admin_headers, self.ABORTS)
        except EndpointUnavailable as error:
            self._hide_key(error)
            raise
        call.running = None
        self.totals.aborts += 1
        if not is_there:
            self._record_death(call, worker)

    def _record_death(self, call: _Call, worker: Worker) -> None:
        """Record that a server died with a request of this call.

        A request that alone was new may have crashed it, e.g. by an id outside its vocabulary: no other server gets it.

        Raises:
            EndpointRefused: it died with this request for the second time.
        """
        worker.away = self._reached
        if call.alone and self._reached:
            call.alone, call.only, call.died = False, worker, time.monotonic()
            call.deaths += 1
            if call.deaths > 1:
                raise EndpointRefused(
                    f"{worker.name} died {call.deaths} times while this request, of {call.ids.count} ids, was the only"
                    " new one: it is not sent again. Is an id outside the model's vocabulary?"
                )

    # -- the protocol -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _request_options(self, sampling: SamplingParams, stop_token_ids: tuple[int, ...], *, top_p_sets: bool) -> bytes:
        """Encode the part of a body that follows its ids.

        Raises:
            ConfigError: the protocol cannot express a parameter.
        """

    @abc.abstractmethod
    def _request_body(
        self,
        rid: str,
        ids: EncodedIds,
        options: bytes,
        namespace: str,
        extras: ExtrasRequest | None,
        images: Sequence[bytes],
    ) -> tuple[bytes, int]:
        """The body of one attempt, and the offset of the ids in it."""

    @abc.abstractmethod
    def _session_headers(self, session: str) -> dict[str, str]:
        """Headers that keep a session on one worker."""

    @abc.abstractmethod
    def _read_completion(self, payload: bytes, request: SentRequest) -> Completion:
        """Decode and check the body of a response with status 200."""

    @abc.abstractmethod
    async def _describe_server(self, worker: Worker) -> ServerInfo:
        """Query the description of one server."""

    @abc.abstractmethod
    async def _is_ready(self, url: str) -> bool | None:
        """Whether a server is not paused; ``None`` if it does not say."""

    @abc.abstractmethod
    async def _check_server(self, worker: Worker, sampling: SamplingParams) -> None:
        """Check before a request whether this server reports the logprobs that the record means.

        Raises:
            ConfigError: it does not for these parameters.
        """

    @abc.abstractmethod
    def _forget_server(self, worker: Worker) -> None:
        """Forget what is known of a server that was away."""

    def _hide_key(self, error: EndpointError) -> None:
        for key in (self.endpoint.api_key, self.endpoint.admin_key):
            if key and key in str(error):  # a server may echo request headers
                error.args = (str(error).replace(key, "***"),)


def _unanswered(call: _Call) -> Completion:
    """The answer to an interrupted call that waited for a server."""
    return Completion(
        tokens=(),
        logprobs=(),
        finish_reason="abort",
        versions=(),
        prompt_tokens=call.ids.count,
        prompt_digest=call.ids.digest,
        request_id=os.urandom(16).hex(),
        seconds=time.monotonic() - call.began,
    )


def _worker(url: str, concurrency: Concurrency) -> Worker:
    limiter = anyio.CapacityLimiter(concurrency if isinstance(concurrency, int) else math.inf)
    return Worker(
        url,
        without_password(url),
        limiter=limiter,
        adaptive_limit=AdaptiveLimit(limiter) if concurrency == "adaptive" else None,
    )


def _header_safe(session: str) -> str:
    return session if session.isascii() and session.isprintable() else quote(session, safe="")
