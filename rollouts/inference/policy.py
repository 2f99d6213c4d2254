"""Policy that samples from servers over HTTP. A subclass names the protocol.

Invariant: one call of :meth:`ServerPolicy.complete` runs at most one generation at a time on all servers, and a call
that is cancelled, late or out of retries aborts its generation. The parts of a call: ``sending.py`` sends one attempt,
``attempts.py`` chooses the step after an error, ``unreachable.py`` waits for servers.

This module knows tokens. It does not know messages, environments, samples, or the format of a server.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Self, TypeAlias
from urllib.parse import quote

import anyio
import anyio.to_thread

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Completion, Endpoint, ImageSpan, SamplingParams, TokenColumn, digest
from rollouts.errors import EndpointUnavailable
from rollouts.inference.attempts import Attempts
from rollouts.inference.base import CompletionRequest, PriorityOrder, ServerInfo, check_takes_images
from rollouts.inference.call import Call
from rollouts.inference.discovery import merged
from rollouts.inference.image_json import ImageTexts, collapsed
from rollouts.inference.prefixes import Namespaces
from rollouts.inference.resumable import InterruptiblePolicy
from rollouts.inference.routing import Worker
from rollouts.inference.sending import Sender
from rollouts.inference.servers import ServerProtocol, Servers
from rollouts.inference.token_json import EncodedIds, SequenceCache
from rollouts.inference.totals import Totals
from rollouts.inference.unreachable import Reachability

__all__ = ["ServerPolicy", "VocabSize", "full_jitter"]

VocabSize: TypeAlias = int | Callable[[], int] | None
"""Number of ids of the model, or a hashable function that returns it."""

_LOG = logging.getLogger(__name__)
_RANDOM = random.Random()  # not the global generator, whose seeded stream belongs to the user

MAX_CONCURRENT_ABORTS = 64


def full_jitter(failures: int) -> float:
    """Return a random backoff in seconds: uniform below a bound that doubles from 0.5 s to 15 s."""
    return _RANDOM.uniform(0.0, min(15.0, 0.5 * 2.0 ** min(failures - 1, 10)))


class ServerPolicy:
    """Samples from one or several servers of the same model (protocol :class:`~rollouts.inference.base.Policy`).

    Opens its connections at first use and closes them with the event loop, with :meth:`aclose`, or at the end of an
    ``async with`` block. Belongs to one event loop at a time.

    Args:
        endpoint: URLs, key, deadlines and number of retries; its ``sampling`` is ignored.
        vocab_size: upper bound of ids, ``None`` if unknown. Other ids are not sent (they would crash the server), and a
            reply that contains one is refused. A function is called in a worker thread before the first request.
        backoff: maps the number of failed attempts (from 1) to the seconds before the next one.
        poll_seconds: seconds between two polls of an unreachable server.
    """

    PROTOCOL: ClassVar[type[ServerProtocol]]

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        vocab_size: VocabSize = None,
        backoff: Callable[[int], float] = full_jitter,
        poll_seconds: float = 1.0,
    ) -> None:
        self.endpoint = endpoint
        self.totals = Totals()
        self.servers = Servers(endpoint, self.PROTOCOL)
        self._workers = self.servers.workers
        self._reachability = Reachability(self.servers, backoff, poll_seconds)
        self._sender = _sender(self.servers, self._reachability, self.totals)
        self._backoff = backoff
        self._namespaces = Namespaces()
        self._unread_vocab_size = vocab_size if callable(vocab_size) else None
        self._reading_lock = anyio.Lock()
        self._sequences = SequenceCache(None if callable(vocab_size) else vocab_size)
        self._images = ImageTexts()
        self._checked_stops: tuple[int, ...] = ()
        self._order: Callable[[], Awaitable[PriorityOrder | None]] | None = None
        self._last_options: tuple[object, bytes] = None, b""

    def __repr__(self) -> str:
        urls = ", ".join(worker.name for worker in self._workers.all)
        done = self.totals
        return (
            f"<{type(self).__name__} {urls}: {self._workers.in_flight} in flight; {done.completions} completions"
            f" from {done.requests} requests, {done.retries} retries, {done.aborts} aborts; tokens:"
            f" {done.prompt_tokens} prompt ({done.cached_tokens} cached), {done.sampled_tokens} sampled>"
        )

    @property
    def takes_images(self) -> bool:
        """Whether requests may have images."""
        return self.PROTOCOL.takes_images

    @property
    def minimum_delays_stops(self) -> bool:
        """Whether no stop string ends a reply within its ``min_new_tokens``."""
        return self.PROTOCOL.minimum_delays_stops

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

    def on_completion(self, record: Callable[[Completion, str], None]) -> None:
        """Call ``record`` with every completion and the name of its server, in place of an earlier function."""
        self._sender.on_completion = record

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; a later call opens new ones."""
        await self.servers.transport.aclose()

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one continuation of the request's tokens.

        Ids are sent unchanged; of a session, only new ids are encoded. Each image is encoded once; see
        :mod:`rollouts.inference.image_json`.

        Raises:
            EndpointUnavailable: no valid response within ``request_seconds`` and ``max_retries``.
            EndpointRefused: the server refuses this request, or its reply cannot be trained or is not about these ids.
            ContextOverflow: prompt and ``max_new_tokens`` exceed the model's context.
            ConfigError: an id is outside the vocabulary, or the protocol does not support images; nothing was sent.
        """
        if request.images:
            check_takes_images(self)
        if self._unread_vocab_size is not None:
            await self._read_vocab_size(self._unread_vocab_size)
        worker = self._workers.worker_for(request.route or request.session)
        call = self._call_of(request, worker)
        attempts = Attempts(self._sender, self._backoff, call, worker)
        try:
            what, seconds = f"POST {worker.name}{self.PROTOCOL.ROUTE}", self.endpoint.request_seconds
            with boundary(EndpointUnavailable, what, seconds=seconds, shown="the model", kind="generation"):
                return await attempts.run()
        except EndpointUnavailable as error:
            if error.__cause__ is None and attempts.last_error not in (None, error):
                raise error from attempts.last_error  # deadline: attach the error of the last attempt
            raise
        finally:
            attempts.last_error = None  # breaks the reference cycle through its traceback

    async def _read_vocab_size(self, read: Callable[[], int]) -> None:
        async with self._reading_lock:
            if self._unread_vocab_size is not None:  # else a concurrent call was first
                vocab_size = await anyio.to_thread.run_sync(read)
                self._sequences, self._unread_vocab_size = SequenceCache(vocab_size), None

    def _call_of(self, request: CompletionRequest, worker: Worker) -> Call:
        """Check and encode a request, which is sent to ``worker`` first."""
        if request.stop_token_ids != self._checked_stops:
            self._sequences.check(request.stop_token_ids, "stop_token_ids")
            self._checked_stops = request.stop_token_ids
        route, headers = request.route or request.session, self.servers.headers
        if route:
            safe = route if route.isascii() and route.isprintable() else quote(route, safe="")
            headers = {**headers, **self.servers.protocol.session_headers(safe)}
        call = Call(
            request,
            ids=self._encode(request.tokens, request.session, request.images),  # no variable: move_into frees the text
            options=self._options(request),
            headers=headers,
            namespace=self._namespaces.of(request.session, worker.url, worker.changed),
            images=self._images.of([span.image for span in request.images]) if request.images else (),
            vocab_size=self._sequences.vocab_size,
            adapter=request.adapter,
        )
        self.totals.encoded_tokens = self._sequences.encoded
        self.totals.encoded_images = self._images.encoded
        return call

    def _encode(self, tokens: TokenColumn, session: str, images: Sequence[ImageSpan]) -> EncodedIds:
        """Encode ids as JSON; with images, count and digest are those of all ids, and one placeholder each is sent."""
        if not images:
            return self._sequences.encode(tokens, session)
        ids = self._sequences.encode(collapsed(tokens, images), session)
        return EncodedIds(ids.pieces, len(tokens), digest(tokens))

    def _options(self, request: CompletionRequest) -> bytes:
        """Encode the options; the bytes of the last call are reused if the options are equal."""
        top_p_sets = request.extras is not None and request.extras.top_p_sets
        key = (request.sampling, request.stop_token_ids, top_p_sets)
        last, options = self._last_options
        if key != last:  # compares identical objects without comparing their fields
            protocol = self.servers.protocol
            options = protocol.request_options(request.sampling, request.stop_token_ids, top_p_sets=top_p_sets)
            self._last_options = key, options
        return options

    def of_rollout(self, urgency: Callable[[], int] | None = None) -> InterruptiblePolicy:
        """The policy of one rollout: all requests have one adapter, and priorities by ``urgency``, where asked for."""
        policy: InterruptiblePolicy = self
        if self.endpoint.lora is not None:
            from rollouts.inference.adapters import RolloutAdapter  # here: few runs have adapters

            policy = RolloutAdapter(self, self.endpoint)
        if self.endpoint.priority and urgency is not None:
            from rollouts.inference.priorities import RolloutPriority  # here: few runs have priorities

            policy = RolloutPriority(policy, urgency, self.priority_order)
        return policy

    async def priority_order(self) -> PriorityOrder | None:
        """How all servers schedule by priority; see :class:`~rollouts.inference.priorities.AgreedOrder`."""
        if self._order is None:
            from rollouts.inference.priorities import AgreedOrder  # here: few runs have priorities

            self._order = AgreedOrder(self.servers.protocol, self._workers, self.wait_for_servers)
        return await self._order()

    async def interrupt(self) -> None:
        """Abort the requests in flight by rid; each is answered at once with the tokens sampled so far.

        Requests that wait for a server are answered without tokens.

        A server does not know a request that has not arrived yet: call again while one is in flight.
        """
        limiter = anyio.CapacityLimiter(MAX_CONCURRENT_ABORTS)
        self._reachability.interrupt()

        async def abort(rid: str, worker: Worker) -> None:
            async with limiter:
                try:
                    await self.servers.abort(worker, rid)
                except EndpointUnavailable:
                    return  # the call itself handles the failure
                self.totals.aborts += 1

        async with anyio.create_task_group() as aborts:
            for rid, worker in list(self._sender.running.items()):
                aborts.start_soon(abort, rid, worker)

    async def abort_all(self, seconds: float, *, grace: float = 0.0) -> None:
        """Abort the requests of all clients on all servers until none is left, after ``grace`` seconds for them to end.

        Raises:
            EndpointUnavailable: a server does not respond, or is still not idle after ``seconds``.
        """
        await self.servers.abort_all(seconds, grace)

    async def poll_pauses(self) -> None:
        """Poll the servers that keep turns waiting for a pause; no answer counts as not paused."""
        await self.servers.poll_pauses()

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
                infos.append(await self.servers.describe(worker))
            except EndpointUnavailable as error:
                missing.append((worker, error))
        if not infos:
            raise missing[0][1]
        for _, problem in missing:
            _LOG.warning("%d of %d servers answer: %s", len(infos), len(self._workers.all), problem)
        info = merged(infos)
        self._reachability.described(info, [worker for worker, _ in missing])
        return info

    async def check_sampling(self, sampling: SamplingParams) -> None:
        """Check before a run that all servers that answer report the logprobs that are stored, and have its adapter.

        Raises:
            ConfigError: a server reports other logprobs for these parameters.
            EndpointRefused: a server lacks the adapter of the endpoint.
        """
        for worker in self._workers.all:
            if not worker.unreachable:
                await self.servers.protocol.check_server(worker, sampling)
        await self._sender.check()

    async def wait_for_servers(self, error: EndpointUnavailable) -> None:
        """Wait until a server answers, with the deadlines of the caller paused, as :meth:`complete` does.

        Args:
            error: the error of a request that no server answered.

        Raises:
            EndpointAway: no server answered any request of this policy for ``outage_seconds``.
            EndpointRefused: the server that answers does not implement the protocol, and none ever answered before.
        """
        await self._reachability.wait_for_any(error)


def _sender(servers: Servers, reachability: Reachability, totals: Totals) -> Sender:
    if servers.endpoint.lora is None:
        return Sender(servers, reachability, totals)
    from rollouts.inference.adapters import AdapterSender  # here: few runs have adapters

    return AdapterSender(servers, reachability, totals)
