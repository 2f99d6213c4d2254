"""Keep-alive pings for sessions that wait for their model; servers close silent sessions.

Invariant: each listed session sends a request at least every ``EVERY`` seconds. Pings come from a separate thread,
so a busy event loop does not delay them; the thread ends with the last session. The result of a ping is ignored, also
an error of any kind: the next request of the session will report it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping

import anyio
import attrs

from rollouts.http.client import HttpClient

__all__ = ["EVERY", "KeepAlive", "Listed"]

EVERY = 10.0
_SECONDS = 10.0
"""Deadline of one ping."""


@attrs.define(eq=False)
class Listed:
    """A session to keep alive."""

    url: str
    headers: Mapping[str, str] = attrs.field(repr=False)
    every: float = EVERY
    heard: float = attrs.field(factory=time.monotonic)
    """Time of the session's last request or ping."""


class KeepAlive:
    """The sessions of a process, and the thread that pings them."""

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
        """Start to ping a session."""
        with self._lock:
            self._listed.add(session)
            if self._thread is None:
                self._thread = threading.Thread(target=anyio.run, args=(self._rounds,), name="ors-ping", daemon=True)
                self._thread.start()

    def discard(self, session: Listed) -> None:
        """Stop pinging a session."""
        with self._lock:
            self._listed.discard(session)

    async def _rounds(self) -> None:
        client = HttpClient(connect_seconds=5.0)
        try:
            while True:
                with self._lock:
                    if not self._listed:
                        self._thread = None
                        return
                    listed = list(self._listed)
                await anyio.sleep(min(session.every for session in listed) / 10)
                now = time.monotonic()
                async with anyio.create_task_group() as tasks:
                    for session in listed:
                        if now - session.heard >= 0.9 * session.every:
                            tasks.start_soon(_ping, client, session)
        finally:
            await client.aclose()


async def _ping(client: HttpClient, session: Listed) -> None:
    session.heard = time.monotonic()
    with anyio.move_on_after(_SECONDS), contextlib.suppress(Exception):  # one session must not end the pings of all
        await client.post(session.url, b"", session.headers)
