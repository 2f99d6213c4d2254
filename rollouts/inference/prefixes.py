"""Namespaces of servers' prefix caches, which keep K/V of different weights apart after updates in place.

Invariant: a conversation keeps the namespace that it began with. New ones after an update in place by this
process share a new namespace, and each that begins during the update has a separate one, so they read no K/V of earlier
weights. An update by another process is seen in replies: conversations that begin after the first reply of other
weights share a new namespace. An update back to an earlier version is an update like any other: conversations of its
first time continued under other weights. Before the first update, all conversations share one namespace.

This module sends nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

__all__ = ["Namespaces", "isolated", "namespace_after"]

MAX_SESSIONS = 1 << 16

_UPDATES: dict[str, tuple[float, str, str] | None] = {}
"""End, namespace and version of the last update in place, by URL; ``None`` while it lasts."""


@contextlib.contextmanager
def isolated(urls: Sequence[str], version: str) -> Iterator[None]:
    """Declare an update in place of these servers while inside."""
    _UPDATES.update(dict.fromkeys(urls))
    try:
        yield
    finally:
        _UPDATES.update(dict.fromkeys(urls, (time.monotonic(), _unused(version), version)))


def namespace_after(since: float, url: str, version: str) -> str:
    """Return the namespace of conversations that begin after a reply by ``version``, the first since other weights.

    It is that of an update in place to this version, if one ended at ``url`` after ``since``, when those came into use.
    """
    update = _UPDATES.get(url)
    return update[1] if update is not None and update[0] > since and update[2] == version else _unused(version)


def _unused(version: str) -> str:
    return f"{version} {os.urandom(8).hex()}"


class Namespaces:
    """The namespaces of the conversations of one policy."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Namespaces of {len(self._sessions)} sessions>"

    def of(self, session: str, url: str, changed: tuple[float, str] = (0.0, "")) -> str:
        """Return the namespace of a session, which may begin now at ``url``; empty for the common one.

        ``changed`` is when replies of that server showed its present weights, and the namespace since then.
        """
        known = self._sessions.get(session) if session else None
        if known is None:
            update = _UPDATES.get(url, changed)
            known = os.urandom(16).hex() if update is None else max(update[:2], changed)[1]
            self._begin(session, known)
        return known

    def _begin(self, session: str, namespace: str) -> None:
        if session:
            self._sessions[session] = namespace
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
