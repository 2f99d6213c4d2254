"""The wait for one server of rewards that cannot be reached: no connection, or status 502, 503 or 504.

Invariant: while requests wait, one of them is sent at a time, once a second, and all continue when the server answers
one of them. The deadlines around the waiting tasks stand still, and the wait is in the list of
:func:`~rollouts.concurrency.deadlines.pauses`, so that no new group starts. The wait is logged once, however many
requests wait, and so is its end. If the server answers nothing for ``outage_seconds``, :class:`ServerAway` ends the
run, and its prompts are returned.

This module sends nothing itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import anyio

from rollouts.concurrency.deadlines import Clocks, listed_pause
from rollouts.errors import EndpointAway
from rollouts.http.client import ConnectFailed, ConnectionLost, ProtocolError
from rollouts.http.pacing import Failed

__all__ = ["MOST_RETURNS", "RequestLosses", "ServerAway", "ServerWait", "clocks_paused"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS, _LONGEST_POLL = 1.0, 60.0
MOST_RETURNS = 3
"""How often a server may be back, for one request, and then not be reached by it again."""
_PROBE_SECONDS = 10.0
"""A request that is not answered in this time has reached the server: a connection opens in 5 seconds, or fails."""

Answer = TypeVar("Answer")


class ServerAway(EndpointAway):
    """A server of rewards answered nothing for ``outage_seconds``."""


class RequestLosses:
    """The losses of one request, by connections that broke: a request that is lost again and again ends its server."""

    def __init__(self) -> None:
        self._count = 0
        self._again = False

    def is_unreachable(self, answer: object) -> bool:
        """Whether an attempt, which is recorded, says that no server is there, and not that this request ends it.

        Losses in a row count once: a proxy accepts connections and closes them while its server is away.
        """
        if not isinstance(answer, Failed):
            self._again = False
            return False
        error, status = answer.error, answer.status
        lost = not status and isinstance(error, ConnectionLost) and not isinstance(error, ProtocolError)
        self._count += lost and not self._again
        self._again = lost
        if lost:
            return self._count < MOST_RETURNS
        return status in (502, 503, 504) or isinstance(error, ConnectFailed)


@contextlib.contextmanager
def clocks_paused(others: Sequence[Clocks]) -> Iterator[None]:
    """Pause the deadlines of this task, and those of other tasks that wait for the same answer, while inside."""
    clocks = (Clocks(), *others)
    for one in clocks:
        one.pause()
    try:
        yield
    finally:
        for one in clocks:
            one.resume()


class ServerWait:
    """The requests that wait for one server, in one event loop.

    Args:
        place: the URL without its password.
        seconds: the longest wait without any answer; 0 waits for nothing.
    """

    def __init__(self, place: str, seconds: float) -> None:
        self.place, self.seconds = place, seconds
        self._since: float | None = None
        self._turn = anyio.Lock()
        self._reason = ""
        self._poll = _POLL_SECONDS
        self._waiting = 0
        self._listed: contextlib.ExitStack | None = None

    @property
    def is_on(self) -> bool:
        """Whether the server could not be reached, and answered nothing since."""
        return self._since is not None

    def begin(self, failed: Failed) -> None:
        """Record that the server cannot be reached; all requests wait from now on."""
        if self._since is None:
            self._since = anyio.current_time()
            text = "no answer from %s: rewards wait for it for up to %g s (outage_seconds); the last: %s"
            _LOG.warning(text, self.place, self.seconds, failed.error)
        self._explain(failed)

    def answered(self) -> None:
        """Record an answer."""
        if self._since is not None:
            _LOG.warning("%s takes requests again after %.1f s", self.place, anyio.current_time() - self._since)
            self._since = None

    async def answer(
        self,
        send: Callable[[], Awaitable[Answer | Failed | None]],
        losses: RequestLosses,
        others: Sequence[Clocks],
    ) -> Answer | Failed | None:
        """Wait until the server answers this request, or another one.

        Args:
            send: sends this request once; calls :meth:`answered` at an answer.
            losses: of this request.
            others: the deadlines of other tasks that wait for it.

        Returns:
            The outcome of this request; ``None`` if the server answered another one, or did not answer in time.

        Raises:
            ServerAway: the server answered nothing for too long.
        """
        with clocks_paused(others), self._listed_wait():
            while True:
                async with self._turn:
                    if not self.is_on:
                        break
                    self._raise_if_over()
                    await anyio.sleep(min(self._poll, self.seconds))
                    answer: Answer | Failed | None = None
                    with anyio.move_on_after(_PROBE_SECONDS) as limit:
                        answer = await send()
                    if limit.cancelled_caught:
                        self.answered()  # it took the request, which is sent again within its deadlines
                    elif not losses.is_unreachable(answer):
                        return answer
                    elif isinstance(answer, Failed):
                        self._explain(answer)
        losses.is_unreachable(None)
        return None

    def _explain(self, failed: Failed) -> None:
        self._reason = str(failed.error)
        self._poll = min(max(_POLL_SECONDS, failed.retry_after or 0.0), _LONGEST_POLL)

    def _raise_if_over(self) -> None:
        if self._since is not None and anyio.current_time() - self._since >= self.seconds:
            raise ServerAway(f"no answer from {self.place} for {self.seconds:g} s (outage_seconds); {self._reason}")

    @contextlib.contextmanager
    def _listed_wait(self) -> Iterator[None]:
        self._waiting += 1
        if self._listed is None:
            self._since = None if self._since is None else anyio.current_time()  # earlier waits were cancelled
            self._listed = contextlib.ExitStack()
            what = f"no answer from {self.place}"
            self._listed.enter_context(listed_pause(what, lambda: self._waiting, blocks_new_work=True))
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._listed.close()
                self._listed = None
