"""Servers that are unreachable: the waits for them, their return, and the requests that crash them.

Invariant: a worker that is unreachable does not get requests before it has described itself with the expected weights.
It becomes unreachable when no connection to it opens, when an abort shows that it died, or when it is missing from a
description of all servers; only :meth:`Reachability.check_return` makes it reachable again.

This module does not send requests for tokens and does not count attempts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import anyio

from rollouts.concurrency.deadlines import paused_deadlines
from rollouts.dtypes import Completion
from rollouts.errors import EndpointError, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import ServerInfo
from rollouts.inference.call import Call
from rollouts.inference.outages import Outage, ServedWeights, ServerUnreachable
from rollouts.inference.routing import Worker
from rollouts.inference.servers import Servers
from rollouts.inference.wire_errors import Overloaded

__all__ = ["Reachability"]

_LOG = logging.getLogger(__name__)


class Reachability:
    """Which servers of one policy can serve, and the calls that wait for one.

    Args:
        servers: the servers.
        backoff: maps the number of waits of a call for an overloaded server to the seconds of the next one.
        poll_seconds: seconds between two polls of an unreachable server.
    """

    def __init__(self, servers: Servers, backoff: Callable[[int], float], poll_seconds: float) -> None:
        self._servers = servers
        self._workers = servers.workers
        self._backoff = backoff
        self._poll_seconds = poll_seconds
        self._patience = servers.endpoint.outage_seconds
        self.outage = Outage(self._patience)
        self._weights = ServedWeights()
        self.any_answered = False
        """Whether a server has ever answered: if not, the URL may be wrong."""
        self._interrupted = anyio.Event()

    def __repr__(self) -> str:
        return f"<Reachability of {self._servers!r}: {self.outage!r}>"

    def interrupt(self) -> None:
        """End the waits of calls without a running generation."""
        self._interrupted.set()
        self._interrupted = anyio.Event()

    # -- records ------------------------------------------------------------------------------------------------------

    def served(self, completion: Completion, worker: Worker, sent: float) -> None:
        """Record the version of the last token of a reply to a request of time ``sent``."""
        if completion.versions:
            version = completion.versions[-1].version
            self._weights.saw(version, again=worker.served(version, sent))

    def described(self, info: ServerInfo, missing: Iterable[Worker]) -> None:
        """Record a description by servers that were reachable, and the servers that did not answer."""
        for worker in missing:
            worker.unreachable = True
            worker.suspect()
        self.any_answered = True
        self._weights.described(info)

    def died(self, call: Call, worker: Worker) -> None:
        """Record that a server died with a request of this call.

        A request that was the only new one may have crashed it, e.g. by an id outside the vocabulary: no other server
        gets it.

        Raises:
            EndpointRefused: it died with this request for the second time.
        """
        worker.unreachable = True
        if call.sole_request:
            call.sole_request, call.pinned_worker, call.died_at = False, worker, time.monotonic()
            call.crashes += 1
            if call.crashes > 1:
                raise EndpointRefused(
                    f"{worker.name} died {call.crashes} times while this request, of {call.ids.count} ids, was the only"
                    " new one: it is not sent again. Is an id outside the model's vocabulary?"
                )

    # -- waits --------------------------------------------------------------------------------------------------------

    async def wait_for_server(self, call: Call, worker: Worker, error: EndpointUnavailable) -> Worker | None:
        """Wait until a server may serve the call after ``error``, with the deadlines of the call paused.

        There are four cases:

        1. The server is overloaded: the call waits for a short time and tries again.
        2. Any server may get the call, and another one serves: no wait.
        3. Only one server may get the call, and others serve: the call waits for that server. This is not an outage,
           so new groups start.
        4. No server serves: the call waits for all that may get it. This is an outage, until any server serves.

        Returns:
            The worker for the next attempt; ``None`` if the wait was interrupted.

        Raises:
            EndpointAway: in cases 1 and 4, no server answered any request of this policy for ``outage_seconds``.
            EndpointRefused: in case 3, the server did not come back in that time.
        """
        bound, overloaded = call.bound_worker, isinstance(error, Overloaded)
        wanted = self._workers.all if bound is None else (bound,)
        is_outage = overloaded or not self._servers.any_reachable
        if overloaded:
            wait = self._outage_wait(f"{worker.name} takes no request ({error})")
        elif is_outage:
            wait = self._outage_wait(_no_answer(wanted))
        elif bound is None:
            return self._workers.reassign(worker, call.route)
        else:
            wait = paused_deadlines()
        interrupted = self._interrupted
        with wait:
            while True:
                if is_outage:
                    self.outage.raise_if_over(self._remedy)
                else:
                    self._raise_if_not_back(call, worker)
                call.waits += 1
                seconds = min(self._poll_seconds, self._backoff(call.waits)) if overloaded else self._poll_seconds
                with anyio.move_on_after(seconds):
                    await interrupted.wait()
                if interrupted.is_set():
                    if call.running is None:
                        return None
                    interrupted = self._interrupted  # its lost generation may still run: it waits for the abort
                if overloaded:
                    return bound or self._workers.reassign(worker, call.route)
                back = await self._first_reachable(wanted)
                if back is not None:
                    return bound or self._workers.move(back, call.route)
                if is_outage and bound is not None and self._servers.any_reachable:
                    return bound  # the outage is over: if this server is still away, the next wait is case 3

    async def wait_for_any(self, error: EndpointUnavailable) -> None:
        """Wait until a server answers, after the error of a request that no server answered.

        Raises:
            EndpointAway: no server answered any request of this policy for ``outage_seconds``.
            EndpointRefused: the server that answers does not implement the protocol, and none ever answered before.
        """
        for worker in self._workers.all:
            worker.unreachable = True
        with self._outage_wait(_no_answer(self._workers.all)):
            while True:
                self.outage.raise_if_over(self._remedy, error)
                await anyio.sleep(self._poll_seconds)
                if await self._first_reachable(self._workers.all) is not None:
                    return

    def _outage_wait(self, reason: str) -> AbstractContextManager[None]:
        """Return the wait for a server; the first one is logged if none ever answered."""
        if not self.any_answered and not self.outage.is_on:
            message = "%s: requests wait for up to %g s (Endpoint.outage_seconds)%s"
            _LOG.warning(message, reason, self._patience, self._remedy)
        return self.outage.wait(reason)

    @property
    def _remedy(self) -> str:
        """The end of a message that no server answers."""
        return "" if self.any_answered else ". Start the server, or correct Endpoint.base_url"

    def _raise_if_not_back(self, call: Call, worker: Worker) -> None:
        if time.monotonic() - call.died_at >= self._patience:
            raise EndpointRefused(
                f"{worker.name} died while this request, of {call.ids.count} ids, was its only new one, and is not back"
                f" after {self._patience:g} s (Endpoint.outage_seconds): no other server gets it"
            )

    # -- returns ------------------------------------------------------------------------------------------------------

    async def check_return(self, worker: Worker) -> None:
        """Check that an unreachable worker serves the right weights again.

        Raises:
            ServerUnreachable: it does not.
            EndpointRefused: it refuses, and no server ever answered: it does not implement the protocol.
        """
        try:
            self._weights.check(worker.name, await self._servers.describe(worker))
        except ServerUnreachable:
            worker.suspect()
            raise
        except EndpointError as error:
            if isinstance(error, EndpointRefused) and not self.any_answered:
                raise
            worker.suspect()
            raise ServerUnreachable(str(error)) from error
        if worker.unreachable:  # else a concurrent call was first, and may have sent its request
            worker.unreachable, worker.suspect_until = False, 0.0
            worker.unanswered.clear()  # of its former process
            self._servers.protocol.forget(worker)

    async def _first_reachable(self, workers: Iterable[Worker]) -> Worker | None:
        """Return the first worker that is reachable, or is back; concurrent calls poll once for all."""
        for worker in workers:
            if not worker.unreachable or await self._is_back(worker):
                return worker
        return None

    async def _is_back(self, worker: Worker) -> bool:
        now = time.monotonic()
        if now - worker.polled < self._poll_seconds / 2:
            return False
        worker.polled = now
        try:
            await self.check_return(worker)
        except ServerUnreachable as error:
            if error.__cause__ is None:  # it is up, with other weights
                self.outage.explain(str(error))
            return False
        return True


def _no_answer(workers: Iterable[Worker]) -> str:
    return f"no server answers at {', '.join(worker.name for worker in workers)}"
