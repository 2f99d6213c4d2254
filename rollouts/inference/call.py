"""One call of ``ServerPolicy.complete``: its encoded request, and its state over all attempts.

Invariant: ``running`` is set from before a request is sent until its generation is known to have ended.

This module sends nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import attrs

from rollouts.dtypes import Completion
from rollouts.inference.base import CompletionRequest
from rollouts.inference.routing import Worker
from rollouts.inference.token_json import EncodedIds

__all__ = ["Call"]


@attrs.define(eq=False)
class Call:
    """One call of ``complete`` over all its attempts."""

    request: CompletionRequest
    ids: EncodedIds
    options: bytes
    """Encoded sampling parameters and stop ids."""
    headers: dict[str, str]
    """Of every attempt; with a session, also the header by which a router keeps it at one server."""
    namespace: str
    """Of the prefix cache (:mod:`rollouts.inference.prefixes`); empty for the common one."""
    images: Sequence[bytes]
    """JSON strings of the images."""
    vocab_size: int | None
    adapter: str = ""
    """The LoRA adapter of the next attempt; empty for the base model."""
    began: float = attrs.field(factory=time.monotonic)
    running: tuple[Worker, str] | None = None
    """Worker and rid of a generation that may be running; no attempt is sent while this is set."""
    waits: int = 0
    """Number of waits for a server."""
    sole_request: bool = False
    """Whether the last attempt was lost as the only new request of its server, and so probably crashed it."""
    crashes: int = 0
    """Number of servers' deaths of which this call is the probable cause."""
    pinned_worker: Worker | None = None
    """The worker that this call probably crashed: no other worker gets the call."""
    died_at: float = 0.0
    """``time.monotonic()`` of the last crash."""

    @property
    def route(self) -> str:
        return self.request.route or self.request.session

    @property
    def bound_worker(self) -> Worker | None:
        """The only worker that may get the call now; ``None`` if any may."""
        return self.pinned_worker if self.running is None else self.running[0]

    def interrupted(self) -> Completion:
        """The reply of a call that was interrupted while it waited for a server: no tokens."""
        return Completion(
            tokens=(),
            logprobs=(),
            finish_reason="abort",
            versions=(),
            prompt_tokens=self.ids.count,
            prompt_digest=self.ids.digest,
            request_id=os.urandom(16).hex(),
            seconds=time.monotonic() - self.began,
        )
