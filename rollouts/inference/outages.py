"""Requests that wait because no server can serve them: all are down, overloaded, or back with other weights.

Invariant: such a wait is not a failure of a rollout. Deadlines of the waiting turns are paused, and
:func:`~rollouts.concurrency.deadlines.pauses` lists the wait, so that no new group starts. Patience is limited:
:class:`~rollouts.errors.EndpointAway` then ends the run, and its prompts go back to the buffer.

This module sends nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rollouts.concurrency.deadlines import Clocks, listed_pause
from rollouts.errors import EndpointAway, EndpointUnavailable
from rollouts.inference.base import ServerInfo

__all__ = ["Outage", "ServedWeights", "ServerUnreachable"]


_FORGOTTEN_SECONDS = 600.0
"""A wait that begins longer after the last one does not belong to the same outage."""


class ServerUnreachable(EndpointUnavailable):
    """The server cannot serve this request now: it is down, or serves other weights."""


class Outage:
    """The waits of the requests of one policy, which give up after ``patience`` seconds."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._waiting: set[Clocks] = set()
        self._listed: contextlib.ExitStack | None = None
        self._reason = ""
        self._since: float | None = None
        self._left = 0.0

    def __repr__(self) -> str:
        return f"<Outage: {len(self._waiting)} requests wait{f': {self._reason}' if self._waiting else ''}>"

    @property
    def is_on(self) -> bool:
        """Whether a request waited, and no request was answered since."""
        return self._since is not None

    @contextlib.contextmanager
    def wait(self, reason: str) -> Iterator[None]:
        """Register a request that waits while inside; its deadlines are paused."""
        clocks = Clocks()
        now = time.monotonic()
        if self._since is None or (not self._waiting and now - self._left > _FORGOTTEN_SECONDS):
            self._since = now
        self._waiting.add(clocks)
        self.explain(reason)
        clocks.pause()
        try:
            yield
        finally:
            self._waiting.discard(clocks)
            clocks.resume()
            if not self._waiting:
                self._left = time.monotonic()
                self._unlist()

    def explain(self, reason: str) -> None:
        """Set the reason that is listed while requests wait."""
        if not self._waiting or (self._listed is not None and reason == self._reason):
            return
        self._unlist()
        self._reason = reason
        self._listed = contextlib.ExitStack()
        self._listed.enter_context(
            listed_pause(reason, lambda: len(self._waiting), since=self._since, blocks_new_work=True)
        )

    def raise_if_over(self, remedy: str = "", cause: Exception | None = None) -> None:
        """Raise :class:`EndpointAway` if no request was answered for ``patience`` seconds since the first one waits.

        Its message ends with ``remedy``, and ``cause`` is the error of the request that waits.
        """
        if self._since is not None and time.monotonic() - self._since >= self._patience:
            raise EndpointAway(
                f"{self._reason}; no request was answered for {self._patience:g} s (Endpoint.outage_seconds){remedy}"
            ) from cause

    def answered(self) -> None:
        """Record that a server answered a request."""
        self._since = None

    def _unlist(self) -> None:
        if self._listed is not None:
            self._listed.close()
            self._listed = None


class ServedWeights:
    """The weights that servers of one endpoint have reported, to recognise a restarted server that lost its weights."""

    def __init__(self) -> None:
        self._versions: dict[str, None] = {}
        """In the order in which they came into use."""
        self._described: tuple[str | None, str | None] = (None, None)
        """Model and version of the first description."""

    def __repr__(self) -> str:
        return f"<ServedWeights {list(self._versions)}>"

    def saw(self, version: str | None, *, again: bool = False) -> None:
        """Record the version of a reply or of a description; ``again`` if a server that had left it is back at it."""
        if again:
            self._versions.pop(version, None)  # type: ignore[arg-type]
        if version is not None:
            self._versions.setdefault(version)

    def described(self, info: ServerInfo) -> None:
        """Record a description by a server that was reachable."""
        if self._described == (None, None):
            self._described = (info.model, info.weight_version)
        self.saw(info.weight_version)

    def check(self, name: str, info: ServerInfo) -> None:
        """Check the weights of a server that was unreachable.

        The version must be that of the last change of a server. One never seen before is accepted after an
        update, since another process may update the weights; before any update it means another model.

        Raises:
            ServerUnreachable: other weights.
        """
        model, described = self._described
        expected = next(reversed(self._versions), None)
        got = info.weight_version
        if expected is not None and got is not None and got != expected:
            if got in self._versions or len(self._versions) == 1:
                raise ServerUnreachable(
                    f"{name} is back with the weights {got!r}; expected {expected!r}: load them with update_weights"
                )
        elif None not in (model, info.model) and model != info.model and expected == described:
            raise ServerUnreachable(f"{name} is back with the model {info.model!r}; expected {model!r}")
