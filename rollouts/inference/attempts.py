"""The attempts of one call, and the step that follows each error.

Invariant: no two attempts generate at once. The next one is sent only after the last one was answered, did not reach
its server, or has ended: its abort was acknowledged, or its server vanished, which closed the connection. A call that
ends in any other way aborts its generation.

This module does not know requests or responses.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import attrs

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Completion
from rollouts.errors import EndpointError, EndpointUnavailable
from rollouts.http.client import ConnectFailed, ConnectionLost
from rollouts.inference.call import Call
from rollouts.inference.completions import BrokenNumbers
from rollouts.inference.outages import ServerUnreachable
from rollouts.inference.routing import Worker
from rollouts.inference.sending import Sender
from rollouts.inference.wire_errors import Overloaded

__all__ = ["Attempts"]


@attrs.define(eq=False)
class Attempts:
    """The attempts of one call."""

    _sender: Sender
    _backoff: Callable[[int], float]
    _call: Call
    _worker: Worker
    """The worker of the next attempt."""
    last_error: EndpointError | None = None
    _failures: int = 0
    _reconnected: bool = False
    """Whether an idle connection that the server had closed was replaced."""

    async def run(self) -> Completion:
        """Send the request until it is answered; reply without tokens if a wait for a server is interrupted.

        Raises:
            EndpointError: the error of an attempt that is not repeated.
        """
        sender, call, new_connection = self._sender, self._call, False
        try:
            while True:
                try:
                    if call.running is not None:
                        await self._abort(*call.running)
                    worker = self._worker = call.pinned_worker or self._worker
                    if worker.unreachable:
                        await sender.reachability.check_return(worker)
                    return await sender.send(call, worker, new_connection=new_connection)
                except BrokenNumbers:  # sampling until it succeeds would hide a broken model
                    raise
                except EndpointUnavailable as error:
                    self.last_error = error
                    new_connection = isinstance(error, ConnectionLost)
                    next_worker = await self._after(error)
                if next_worker is None:
                    return call.interrupted()
                self._worker = next_worker
                sender.totals.retries += 1
        finally:
            if call.running is not None:
                with anyio.CancelScope(shield=True):
                    try:
                        await self._abort(*call.running)
                    except EndpointError as error:
                        self.last_error = error  # the server aborts it once it notices the closed connection

    async def _after(self, error: EndpointUnavailable) -> Worker | None:
        """Return the worker of the next attempt; ``None`` if a wait for a server was interrupted.

        There are four cases, of which only the last is a failed attempt:

        1. A reused connection broke before the response: the server had closed it while it was idle. The same worker
           gets the request at once; a second such error of a call is another case.
        2. A connection broke, and no process listens there any more: the server died. Another worker is next,
           unless this request may have caused it: then only that worker gets it again.
        3. No server can serve the call now: it waits.
        4. Any other error: another worker is next, after a pause, up to ``max_retries`` times. If then no connection to
           abort a lost request opens, its server died as in case 2.

        Raises:
            EndpointUnavailable: too many attempts failed.
        """
        workers, call = self._sender.servers.workers, self._call
        if isinstance(error, ConnectionLost):
            if error.stale and not self._reconnected:
                self._reconnected = True
                return self._worker
            if await self._has_died():
                return workers.reassign(self._worker, call.route)
        if self._is_outage(error):
            return await self._sender.reachability.wait_for_server(call, self._worker, error)
        self._failures += 1
        if self._failures > self._sender.servers.endpoint.max_retries:
            if call.running is not None and call.running[0].unreachable:
                worker, call.running = call.running[0], None
                self._sender.reachability.died(call, worker)
                return workers.reassign(worker, call.route)
            raise EndpointUnavailable(f"gave up after {self._failures} attempts: {error}") from error
        failed = self._worker if call.running is None else call.running[0]  # the abort may have failed
        worker = workers.reassign(failed, call.route)
        what = f"pause after {self._failures} failed attempts at {worker.name}"
        with boundary(EndpointUnavailable, what, kind="a_pause"):
            await anyio.sleep(self._backoff(self._failures))
        return worker

    async def _has_died(self) -> bool:
        """Abort the lost request; return whether no process listens any more where it was sent."""
        if self._call.running is None:
            return False
        worker, rid = self._call.running
        try:
            await self._abort(worker, rid)
        except EndpointUnavailable:
            return False
        return worker.unreachable

    def _is_outage(self, error: EndpointUnavailable) -> bool:
        """Whether an error shows that no server can serve the call now."""
        if self._call.running is not None:  # its abort failed
            return not self._sender.servers.any_reachable
        return isinstance(error, ConnectFailed | ServerUnreachable | Overloaded)

    async def _abort(self, worker: Worker, rid: str) -> None:
        """Abort the generation of this call; raises EndpointUnavailable if it may still be running."""
        listens = await self._sender.servers.abort(worker, rid)
        self._call.running = None
        self._sender.totals.aborts += 1
        if not listens:
            self._sender.reachability.died(self._call, worker)
