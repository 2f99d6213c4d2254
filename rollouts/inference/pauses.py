"""Servers that are paused for new weights: they accept requests and do not answer them.

Invariant: a pause is not a failure. While a server is known to be paused, the deadlines of the turns that wait for it
are paused, and nothing is counted, retried or sent elsewhere because of it.
:func:`~rollouts.concurrency.deadlines.pauses` lists the pause with the number of waiting turns.

A pause by this process (:func:`ordered`) is known at once to all its policies. A pause by another process is detected
by polling ``/ready``, which returns 503 meanwhile, while ``/health`` blocks for 20 s (SGLang 0.5.23). A detected pause
stops deadlines for :data:`PATIENCE_SECONDS` at most, since its initiator may be dead. This module does not send
requests for tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import anyio

from rollouts.concurrency.deadlines import Clocks, listed_pause
from rollouts.errors import EndpointUnavailable
from rollouts.http.client import HttpClient

__all__ = ["PATIENCE_SECONDS", "Pause", "is_ready", "ordered", "watch_pauses"]

PATIENCE_SECONDS = 3600.0
POLL_SECONDS = 2.0
"""Timeout of one poll. A server that completed a turn more recently is not polled."""

_LOCK = threading.Lock()
_ORDERED: Counter[str] = Counter()
_ALL: weakref.WeakSet[Pause] = weakref.WeakSet()


class Pause:
    """Pause state of one server, with the deadlines of the turns that wait for it.

    Args:
        url: URL of the server.
        name: the URL without credentials, for messages.
        patience: maximum seconds for which a pause of another process stops deadlines.
    """

    def __init__(self, url: str, name: str, *, patience: float = PATIENCE_SECONDS) -> None:
        self.url = url
        self._name = name
        self._patience = patience
        self._waiting: set[Clocks] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._detected_since: float | None = None
        self._detected = False
        self._listed: contextlib.ExitStack | None = None
        with _LOCK:
            _ALL.add(self)

    def __repr__(self) -> str:
        state = "paused" if self.is_on else "not paused"
        return f"<Pause of {self._name}: {state}, {len(self._waiting)} turns wait for an answer>"

    @property
    def is_on(self) -> bool:
        """Whether the server is known to be paused."""
        return self._listed is not None

    def entered(self) -> Clocks:
        """Register a waiting turn; its deadlines must be passed to :meth:`left`."""
        clocks = Clocks()
        self._waiting.add(clocks)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self.is_on or self.url in _ORDERED:
            self.refresh()
            if self.is_on:  # another thread may have ended it meanwhile
                clocks.pause()
        return clocks

    def left(self, clocks: Clocks) -> None:
        """Unregister a turn."""
        self._waiting.discard(clocks)
        clocks.resume()

    def detected(self, paused: bool) -> None:
        """Record the result of a poll."""
        now = time.monotonic()
        if not paused:
            self._detected_since = None
        elif self._detected_since is None:
            self._detected_since = now
        self._detected = self._detected_since is not None and now - self._detected_since < self._patience
        self.refresh()

    def refresh(self) -> None:
        """Start or end the pause; runs in the event loop of the waiting turns."""
        on = self._detected or self.url in _ORDERED
        if on and self._listed is None:
            self._listed = contextlib.ExitStack()
            self._listed.enter_context(
                listed_pause(f"{self._name} is paused for new weights", lambda: len(self._waiting))
            )
            for clocks in self._waiting:
                clocks.pause()
        elif not on and self._listed is not None:
            self._listed.close()
            self._listed = None
            for clocks in self._waiting:
                clocks.resume()

    def refresh_from_thread(self) -> None:
        """Schedule :meth:`refresh`, from any thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        if _running_loop() is loop:
            self.refresh()
        else:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self.refresh)


@contextlib.contextmanager
def ordered(url: str) -> Iterator[None]:
    """Declare that this process pauses the server, or keeps it from answering, inside the context."""
    _count(url, 1)
    try:
        yield
    finally:
        _count(url, -1)


def _count(url: str, change: int) -> None:
    with _LOCK:
        _ORDERED[url] += change
        if not _ORDERED[url]:
            del _ORDERED[url]
        affected = [pause for pause in _ALL if pause.url == url]
    for pause in affected:
        pause.refresh_from_thread()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def is_ready(transport: HttpClient, url: str, headers: Mapping[str, str]) -> bool | None:
    """Poll ``/ready``; ``None`` if the server lacks the route or does not answer."""
    with anyio.move_on_after(POLL_SECONDS), contextlib.suppress(EndpointUnavailable):
        status, _ = await transport.get(f"{url}/ready", headers)
        return {200: True, 503: False}.get(status)
    return None


class _PausablePolicy(Protocol):
    async def poll_pauses(self) -> None: ...


async def watch_pauses(policies: Callable[[], Iterable[_PausablePolicy]], *, every: float = 1.0) -> None:
    """Poll for pauses by other processes until cancelled; runs in parallel to a run."""
    while True:
        await anyio.sleep(every)
        for policy in policies():
            await policy.poll_pauses()
