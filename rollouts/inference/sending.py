"""One attempt of a call: its request is sent to one worker, and the response is read and checked.

Invariant: ``Call.running`` is unset only if the server did not receive the request, answered it, or refused it. A
request without an answer stays among ``Worker.unanswered``, so that a crash can be attributed to it.

This module does not retry.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import anyio.to_thread

from rollouts.concurrency.fair_turns import FairTurns
from rollouts.dtypes import Completion
from rollouts.errors import ContextOverflow, EndpointError, EndpointRefused, EndpointUnavailable
from rollouts.http.answers import message_of
from rollouts.http.client import ConnectFailed, ConnectionLost
from rollouts.inference.call import Call
from rollouts.inference.completions import SentRequest, check_obeyed, max_response_bytes
from rollouts.inference.routing import Worker
from rollouts.inference.servers import Servers
from rollouts.inference.totals import Totals
from rollouts.inference.unreachable import Reachability
from rollouts.inference.wire_errors import MayStillRun, error_of

__all__ = ["Sender"]

_CRASH_SECONDS = 1.0
"""A request takes longer than this to crash its server: an id outside the vocabulary took 65 s."""
_LONG_REPLY = 1 << 16
"""Bytes (some 1,600 tokens) from which a response is decoded alone in its loop iteration."""
_LARGE_REPLY = 1 << 20
"""Bytes from which a response with extras is decoded in a thread: routed experts take megabytes."""


class Sender:
    """Sends the requests for tokens of one policy."""

    def __init__(self, servers: Servers, reachability: Reachability, totals: Totals) -> None:
        self.servers = servers
        self._protocol = servers.protocol
        self.reachability = reachability
        self.totals = totals
        self._turns = FairTurns()
        self._long_reply_lock = anyio.Lock(fast_acquire=True)
        self.on_completion: Callable[[Completion, str], None] | None = None
        """Called with every completion and the name of its server."""
        self.running: dict[str, Worker] = {}
        """Workers of the requests in flight, by rid."""

    def __repr__(self) -> str:
        return f"<Sender: {len(self.running)} requests in flight>"

    def send(self, call: Call, worker: Worker, *, new_connection: bool) -> Awaitable[Completion]:
        """Send one request to a worker, within its limit, and return the checked completion.

        Raises:
            EndpointError: no valid response.
            ConfigError: the server does not report the logprobs that the record means.
        """
        if worker.limiter.total_tokens == math.inf:
            return self._send(call, worker, new_connection)  # one coroutine fewer a call
        return self._send_limited(call, worker, new_connection)

    async def _send_limited(self, call: Call, worker: Worker, new_connection: bool) -> Completion:
        await self.servers.query_load(worker)
        async with worker.limiter:
            completion = await self._send(call, worker, new_connection)
        await self.servers.query_load(worker)
        return completion

    async def _send(self, call: Call, worker: Worker, new_connection: bool) -> Completion:
        # Fixed width: an abort also ends requests whose rid begins with its rid (SGLang 0.5.23, managers/scheduler.py:
        # abort_request).
        rid = os.urandom(16).hex()
        request = call.request
        body, start = self._protocol.request_body(rid, call)
        call.ids.move_into(body, start)
        self.totals.requests += 1
        worker.in_flight += 1
        self.running[rid] = worker
        worker.unanswered[rid] = sent = time.monotonic()
        call.sole_request = False
        clocks = worker.pause.entered()
        try:
            await self._protocol.check_server(worker, request.sampling)
            call.running = (worker, rid)
            status, payload = await self.servers.transport.post(
                f"{worker.url}{self._protocol.ROUTE}",
                body,
                call.headers,
                new_connection=new_connection,
                max_bytes=_max_bytes(call, body),
            )
        except BaseException as error:
            _record_loss(call, worker, rid, sent, error)
            raise
        finally:
            worker.pause.left(clocks)
            worker.in_flight -= 1
            del self.running[rid]
        worker.unanswered.pop(rid, None)
        self.reachability.any_answered = True
        try:
            if status != 200:
                raise self._refusal(call, worker, status, payload)
            call.running = None
            await self._turns.passed()  # of replies that arrive together, few are read in one turn of the loop
            answer = self._sent_request(call, worker, rid, sent)
            if len(payload) >= _LONG_REPLY:
                # Of long responses that arrive together, decode one in each loop iteration.
                async with self._long_reply_lock:
                    await anyio.lowlevel.checkpoint()
            read = functools.partial(self._protocol.read_completion, payload, answer)
            large = request.extras is not None and len(payload) >= _LARGE_REPLY
            completion = await anyio.to_thread.run_sync(read) if large else read()
            check_obeyed(completion, request.sampling, request.stop_token_ids)
            named = self._named(completion, call)
        except (EndpointUnavailable, EndpointRefused, ContextOverflow) as error:
            self.servers.hide_keys(error)
            raise
        self.reachability.served(completion, worker, sent)
        self._record(named, worker)
        return named

    def _named(self, completion: Completion, call: Call) -> Completion:
        """The completion with the versions of its tokens: with adapters, the name of the adapter.

        Raises:
            EndpointRefused: the server has other base weights than before.
        """
        return completion

    async def check(self) -> None:
        """Check before a run that the servers have the adapter that requests name; without adapters, do nothing.

        Raises:
            EndpointRefused: a server does not have it.
        """

    def _refusal(self, call: Call, worker: Worker, status: int, payload: bytes) -> EndpointError:
        """Return the error for a response without a completion; unset ``running`` unless the generation may run."""
        key = ". Check Endpoint.api_key" if status in (401, 403) else ""
        error = error_of(status, f"{message_of(payload)} (POST {worker.name}{self._protocol.ROUTE}){key}")
        if not isinstance(error, MayStillRun):
            call.running = None
        return error

    def _sent_request(self, call: Call, worker: Worker, rid: str, sent: float) -> SentRequest:
        request = call.request
        return SentRequest(
            rid,
            call.ids,
            stop=request.sampling.stop,
            seconds=time.monotonic() - call.began,
            waited=sent - call.began,
            server=worker.name,
            vocab_size=call.vocab_size,
            extras=request.extras,
            images=len(request.images),
            constrained=request.sampling.constrained,
            adapter=call.adapter,
            expanded=request.tokens if request.images else None,
        )

    def _record(self, completion: Completion, worker: Worker) -> None:
        """Record a completion: its worker is reachable, and the requests that it lost before did not crash it."""
        worker.suspect_until, worker.answered = 0.0, time.monotonic()
        if len(worker.unanswered) > worker.in_flight:
            worker.unanswered = {rid: sent for rid, sent in worker.unanswered.items() if rid in self.running}
        self.reachability.outage.answered()
        self.totals.add(completion)
        if self.on_completion is not None:
            self.on_completion(completion, worker.name)


def _max_bytes(call: Call, body: bytes) -> int:
    request = call.request
    size = len(body) - sum(map(len, call.images)) if call.images else len(body)
    return max_response_bytes(size, request.sampling, call.ids.count, request.extras, has_images=bool(call.images))


def _record_loss(call: Call, worker: Worker, rid: str, sent: float, error: BaseException) -> None:
    """Record the end of a request without a response.

    There are three cases:

    1. No connection was opened: the server did not receive the request, and is unreachable.
    2. The connection broke: the server may still generate, or the request crashed it. A server that was stopped while
       idle breaks a reused connection at once; a crash takes longer.
    3. Anything else, e.g. a cancellation: it says nothing about the server.
    """
    if isinstance(error, ConnectionLost):
        stopped = error.stale and time.monotonic() - sent < _CRASH_SECONDS
        call.sole_request = not stopped and worker.is_sole_request(rid)
        worker.suspect()
        return
    worker.unanswered.pop(rid, None)
    if isinstance(error, ConnectFailed):
        call.running = None
        worker.unreachable = True
        worker.suspect()
