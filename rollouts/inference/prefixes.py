"""Namespaces of servers' prefix caches, which keep K/V of different weights apart after updates in place.

Invariant: a conversation keeps the namespace that it began with. One that begins after an update in place by this
process has the namespace of that version, and a conversation that begins during the update has a separate namespace, so
it does not read K/V of earlier weights. An update by another process is seen in replies: a conversation that begins
after the first reply of a newer version has the namespace of that version. Before the first update, all conversations
share one namespace.

This module sends nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence

__all__ = ["Namespaces", "isolated"]

MAX_SESSIONS = 1 << 16

_VERSIONS: dict[str, str | None] = {}
"""Version of the last update in place, by URL; ``None`` while it lasts."""


@contextlib.contextmanager
def isolated(urls: Sequence[str], version: str) -> Iterator[None]:
    """Declare an update in place of these servers while inside."""
    _VERSIONS.update(dict.fromkeys(urls))
    try:
        yield
    finally:
        _VERSIONS.update(dict.fromkeys(urls, version))


class Namespaces:
    """The namespaces of the conversations of one policy."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Namespaces of {len(self._sessions)} sessions>"

    def of(self, session: str, url: str, served: str = "") -> str:
        """Return the namespace of a session, which may begin now at ``url``; empty for the common one.

        ``served`` is the newest version of the replies of that server, if it changed.
        """
        known = self._sessions.get(session) if session else None
        if known is None:
            current = _VERSIONS.get(url, "")
            known = os.urandom(16).hex() if current is None else served or current
            self._begin(session, known)
        return known

    def _begin(self, session: str, namespace: str) -> None:
        if session:
            self._sessions[session] = namespace
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
