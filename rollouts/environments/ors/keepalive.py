"""Signs of life for sessions that are waiting for their model: a server takes those that are silent for dead.

Invariant: while a session is listed here, its server hears of it at least every ``EVERY`` seconds, however busy the
event loop of the rollouts is: the signs are sent from a thread of their own, which ends when no session is left. What
comes of a sign is not looked at; the next request of the session will find out.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping

import anyio
import attrs

from rollouts.errors import EndpointUnavailable
from rollouts.http.client import HttpClient

__all__ = ["EVERY", "KeepAlive", "Listed"]

EVERY = 10.0
_SECONDS = 10.0
"""Deadline of one sign."""


@attrs.define(eq=False)
class Listed:
    """A session that is to be kept alive."""

    url: str
    headers: Mapping[str, str] = attrs.field(repr=False)
    every: float = EVERY
    heard: float = attrs.field(factory=time.monotonic)
    """When it was last asked for anything, which is a sign of life too."""


class KeepAlive:
    """The sessions of a process, and the thread that speaks for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: set[Listed] = set()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<KeepAlive of {len(self._listed)} sessions>"

    @property
    def running(self) -> bool:
        return self._thread is not None

    def add(self, session: Listed) -> None:
        """Keep a session alive from now on."""
        with self._lock:
            self._listed.add(session)
            if self._thread is None:
                self._thread = threading.Thread(target=anyio.run, args=(self._rounds,), name="ors-ping", daemon=True)
                self._thread.start()

    def discard(self, session: Listed) -> None:
        """Let it go."""
        with self._lock:
            self._listed.discard(session)

    async def _rounds(self) -> None:
        transport = HttpClient(connect_seconds=5.0)
        try:
            while True:
                with self._lock:
                    if not self._listed:
                        self._thread = None
                        return
                    listed = list(self._listed)
                await anyio.sleep(min(session.every for session in listed) / 10)
                now = time.monotonic()
                async with anyio.create_task_group() as signs:
                    for session in listed:
                        if now - session.heard >= 0.9 * session.every:
                            signs.start_soon(_sign, transport, session)
        finally:
            await transport.aclose()


async def _sign(transport: HttpClient, session: Listed) -> None:
    session.heard = time.monotonic()
    with anyio.move_on_after(_SECONDS), contextlib.suppress(EndpointUnavailable):
        await transport.post(session.url, b"", session.headers)
