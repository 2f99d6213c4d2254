"""Servers that are paused for new weights: they are up, take requests, and answer none.

Invariant: a pause is no failure. While a server is known to be paused the deadlines of whoever waits for its answer do
not run, and nothing is counted, tried again or sent elsewhere because of it;
:func:`~rollouts.concurrency.deadlines.pauses` lists
it, with the number of turns that wait.

A pause is known at once where this process orders it (:func:`ordered`), whoever's policy it concerns; one that somebody
else ordered is seen by a look at ``/ready``, which answers 503 meanwhile (``/health`` would block). A pause that was
only seen stops the clocks for :data:`PATIENCE_SECONDS` at most: whoever ordered it may be dead. This module sends no
request for tokens.
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
LOOK_SECONDS = 2.0
"""A server that takes longer to answer a look says nothing. One that answered a turn as lately is not asked."""

_LOCK = threading.Lock()
_ORDERED: Counter[str] = Counter()
_ALL: weakref.WeakSet[Pause] = weakref.WeakSet()


class Pause:
    """What is known of one server, and who waits for it.

    Args:
        url: the server's.
        name: for messages, without credentials.
        patience: seconds that a pause is believed in which was only seen.
    """

    def __init__(self, url: str, name: str, *, patience: float = PATIENCE_SECONDS) -> None:
        self.url = url
        self._name = name
        self._patience = patience
        self._waiting: set[Clocks] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seen_since: float | None = None
        self._seen = False
        self._listed: contextlib.ExitStack | None = None
        with _LOCK:
            _ALL.add(self)

    def __repr__(self) -> str:
        state = "paused" if self.is_on else "not paused"
        return f"<Pause of {self._name}: {state}, {len(self._waiting)} turns wait for an answer>"

    @property
    def is_on(self) -> bool:
        """Whether the server is paused, as far as is known here."""
        return self._listed is not None

    def entered(self) -> Clocks:
        """A turn waits for the server from now on; to be given back to :meth:`left`."""
        clocks = Clocks()
        self._waiting.add(clocks)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self.is_on or self.url in _ORDERED:
            self.look_again()
            clocks.pause()
        return clocks

    def left(self, clocks: Clocks) -> None:
        """It does no longer."""
        self._waiting.discard(clocks)
        clocks.resume()
        if self.is_on:
            for other in self._waiting:  # a deadline that both are in, of their group, was stopped by one of them
                other.pause()

    def seen(self, paused: bool) -> None:
        """What a look has found."""
        now = time.monotonic()
        if not paused:
            self._seen_since = None
        elif self._seen_since is None:
            self._seen_since = now
        self._seen = self._seen_since is not None and now - self._seen_since < self._patience
        self.look_again()

    def look_again(self) -> None:
        """Begin or end, as what is ordered and seen says; in the loop of those who wait."""
        on = self._seen or self.url in _ORDERED
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

    def tell(self) -> None:
        """Have it look again, from any thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        if _running_loop() is loop:
            self.look_again()
        else:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(self.look_again)


@contextlib.contextmanager
def ordered(url: str) -> Iterator[None]:
    """This process pauses a server while inside, or keeps it from answering in another way."""
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
        concerned = [pause for pause in _ALL if pause.url == url]
    for pause in concerned:
        pause.tell()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def is_ready(transport: HttpClient, url: str, headers: Mapping[str, str]) -> bool | None:
    """Ask a server whether it is ready; ``None`` if it does not say."""
    with anyio.move_on_after(LOOK_SECONDS), contextlib.suppress(EndpointUnavailable):
        status, _ = await transport.get(f"{url}/ready", headers)
        return {200: True, 503: False}.get(status)
    return None


class _Looking(Protocol):
    async def look_for_pauses(self) -> None: ...


async def watch_pauses(policies: Callable[[], Iterable[_Looking]], *, every: float = 1.0) -> None:
    """Look for pauses that others have ordered, until cancelled; beside a run."""
    while True:
        await anyio.sleep(every)
        for policy in policies():
            await policy.look_for_pauses()
