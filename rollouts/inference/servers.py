"""The servers of one endpoint, and the requests to them that are not for tokens: descriptions, load, pauses, aborts.

Invariant: an error of a server never contains a key of the endpoint. :class:`ServerProtocol` is everything in which
SGLang and vLLM differ.

This module does not know retries or outages.
"""

from __future__ import annotations

import abc
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import anyio

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Completion, Concurrency, Endpoint, SamplingParams
from rollouts.errors import EndpointError, EndpointUnavailable, without_password
from rollouts.http.client import ConnectFailed, HttpClient
from rollouts.inference.aborts import AbortRoutes, abort_generation, headers_of
from rollouts.inference.base import PriorityOrder, ServerInfo
from rollouts.inference.call import Call
from rollouts.inference.completions import SentRequest
from rollouts.inference.pauses import POLL_SECONDS
from rollouts.inference.routing import Worker, Workers

__all__ = ["ServerProtocol", "Servers"]

DESCRIBE_SECONDS = 30.0
LOAD_SECONDS = 2.0

Probe: TypeAlias = Callable[[HttpClient, str, Mapping[str, str]], Awaitable[Any]]
"""Called with the transport, the URL of a server and the headers of its requests."""


class ServerProtocol(abc.ABC):
    """Format and routes of one kind of server, and the facts known of each server."""

    ROUTE: ClassVar[str]
    """Path to which requests for a completion are sent."""
    ABORTS: ClassVar[AbortRoutes]
    takes_images: ClassVar[bool] = False
    """Whether requests may have images."""
    minimum_delays_stops: ClassVar[bool] = False
    """Whether no stop string ends a reply within its ``min_new_tokens``."""

    def __init__(self, transport: HttpClient, headers: Mapping[str, str]) -> None:
        self._transport = transport
        self._headers = headers
        self.probed: dict[str, Any] = {}
        """The findings of the probes, by the URL of the server."""
        self._probing: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def probe(self, worker: Worker, send: Probe) -> Any:
        """Return the finding of ``send`` for a server; it is called once until the server is forgotten."""
        if worker.url not in self.probed:
            async with self._probing[worker.url]:
                if worker.url not in self.probed:
                    self.probed[worker.url] = await send(self._transport, worker.url, self._headers)
        return self.probed[worker.url]

    def forget(self, worker: Worker) -> None:
        """Forget what was found of a server that was unreachable."""
        self.probed.pop(worker.url, None)

    @abc.abstractmethod
    def request_options(self, sampling: SamplingParams, stop_token_ids: tuple[int, ...], *, top_p_sets: bool) -> bytes:
        """Encode the part of a body that follows its ids.

        Raises:
            ConfigError: the protocol cannot express a parameter.
        """

    @abc.abstractmethod
    def request_body(self, rid: str, call: Call) -> tuple[bytes, int]:
        """Return the body of one attempt, and the offset of the ids in it."""

    @abc.abstractmethod
    def session_headers(self, session: str) -> dict[str, str]:
        """Return the headers that keep a session on one worker."""

    @abc.abstractmethod
    def read_completion(self, payload: bytes, request: SentRequest) -> Completion:
        """Decode and check the body of a response with status 200."""

    @abc.abstractmethod
    async def describe(self, worker: Worker) -> ServerInfo:
        """Query the description of one server."""

    @abc.abstractmethod
    async def priority_order(self, worker: Worker) -> PriorityOrder | None:
        """Query how a server schedules by priority; ``None`` if it does not, or does not say."""

    @abc.abstractmethod
    async def is_ready(self, url: str) -> bool | None:
        """Query whether a server is not paused; ``None`` if it does not say."""

    @abc.abstractmethod
    async def check_server(self, worker: Worker, sampling: SamplingParams) -> None:
        """Check before a request that this server reports the logprobs that the record means.

        Raises:
            ConfigError: it does not for these parameters.
        """


class Servers:
    """The servers of one endpoint."""

    def __init__(self, endpoint: Endpoint, protocol: type[ServerProtocol]) -> None:
        self.endpoint = endpoint
        self.transport = HttpClient(connect_seconds=endpoint.connect_seconds)
        self.headers = headers_of(endpoint)
        self._admin_headers = headers_of(endpoint, admin=True)
        self.protocol = protocol(self.transport, self.headers)
        self.workers = Workers([_worker(url, endpoint.concurrency) for url in endpoint.base_url])

    def __repr__(self) -> str:
        return f"<Servers {', '.join(worker.name for worker in self.workers.all)}>"

    @property
    def any_reachable(self) -> bool:
        """Whether some server was not unreachable at its last attempt."""
        return not all(worker.unreachable for worker in self.workers.all)

    async def describe(self, worker: Worker) -> ServerInfo:
        """Query the description of one server, within :data:`DESCRIBE_SECONDS`."""
        with boundary(EndpointUnavailable, f"the description of {worker.name}", seconds=DESCRIBE_SECONDS):
            try:
                return await self.protocol.describe(worker)
            except EndpointError as error:
                self.hide_keys(error)
                raise

    async def abort(self, worker: Worker, rid: str) -> bool:
        """Abort one generation; see :func:`~rollouts.inference.aborts.abort_generation`."""
        try:
            return await abort_generation(self.transport, worker.url, rid, self._admin_headers, self.protocol.ABORTS)
        except EndpointUnavailable as error:
            worker.unreachable |= isinstance(error, ConnectFailed)
            self.hide_keys(error)
            raise

    async def abort_all(self, seconds: float, grace: float) -> None:
        """Abort all requests on each server in turn; see :func:`~rollouts.inference.idle.abort_until_idle`."""
        from rollouts.inference.idle import abort_until_idle  # here: few runs end the requests of other clients

        routes = self.protocol.ABORTS
        for worker in self.workers.all:
            await abort_until_idle(
                self.transport, worker.url, self._admin_headers, routes, seconds=seconds, grace=grace
            )

    async def poll_pauses(self) -> None:
        """Poll the servers that keep turns waiting for a pause; no answer counts as not paused."""
        for worker in self.workers.all:
            waiting = worker.in_flight and time.monotonic() - worker.answered > POLL_SECONDS
            if waiting or worker.pause.is_on:
                worker.pause.detected(await self.protocol.is_ready(worker.url) is False)

    async def query_load(self, worker: Worker) -> None:
        """Query the load of a server if it is due: one request a second does so for all."""
        limit, routes = worker.adaptive_limit, self.protocol.ABORTS
        if limit is None or not limit.claim_query():
            return
        try:
            with anyio.move_on_after(LOAD_SECONDS):
                status, payload = await self.transport.get(f"{worker.url}{routes.load}", self.headers)
                limit.update(routes.read_load(payload) if status == 200 else None)
                return
        except EndpointUnavailable:
            pass  # the next request to this server reports it
        finally:
            limit.end_query()

    def hide_keys(self, error: EndpointError) -> None:
        """Replace the keys of the endpoint in an error: a server may echo request headers."""
        for key in (self.endpoint.api_key, self.endpoint.admin_key):
            if key and key in str(error):
                error.args = (str(error).replace(key, "***"),)


def _worker(url: str, concurrency: Concurrency) -> Worker:
    limiter = anyio.CapacityLimiter(concurrency if isinstance(concurrency, int) else math.inf)
    worker = Worker(url, without_password(url), limiter=limiter)
    if concurrency == "adaptive":
        from rollouts.inference.limiter import AdaptiveLimit  # here: most limits are fixed

        worker.adaptive_limit = AdaptiveLimit(limiter)
    return worker
