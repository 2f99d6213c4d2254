"""A policy that resumes interrupted completions, after its own pauses and after aborts by the server.

Invariant: an interrupted completion is continued from exactly its own ids; a reply with a grammar starts again. The
result is one sequence, each token with the logprob and the version with which it was sampled, and has the distribution
of an uninterrupted one (law 10, see ``reply_parts.py``). While the policy is paused nothing is sampled, and the
deadlines of waiting calls are paused.

It does not know trainers, messages or samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import anyio
import attrs

from rollouts.concurrency.boundary import boundary
from rollouts.concurrency.deadlines import paused_deadlines
from rollouts.dtypes import Completion, Extras, SamplingParams, TokenColumn, VersionSpan
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.inference.base import (
    CompletionRequest,
    ExtrasRequest,
    Policy,
    PolicyWrapper,
    describe_as,
)

if TYPE_CHECKING:
    from rollouts.inference.reply_parts import Decode

__all__ = ["InterruptiblePolicy", "ResumablePolicy", "SessionRecorder"]

_EMPTY_ABORTS = 30
"""Consecutive aborts without a token after which a server counts as broken."""
_MOST_SESSIONS = 1 << 16
_INTERRUPT_SECONDS = 0.5
"""Delay before the next interrupt: the server does not know a request that had not arrived at the last one."""


class InterruptiblePolicy(Policy, Protocol):
    """A policy whose requests in flight can be ended early with the tokens sampled so far."""

    async def interrupt(self) -> None: ...


class SessionRecorder(PolicyWrapper):
    """A policy that also lists the session names (routing keys) of its calls, in order of first use."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self.sessions: list[str] = []
        describe_as(self, inner)

    async def complete(self, request: CompletionRequest) -> Completion:
        """See :class:`rollouts.inference.base.Policy`."""
        name = request.route or request.session
        if name not in self.sessions:
            self.sessions.append(name)
        return await self.inner.complete(request)


class ResumablePolicy(PolicyWrapper):
    """Adds pause and resume to a policy.

    Args:
        inner: policy that samples.
        decode: the text of ids, special tokens included; needed for stop strings, which may span an interruption.
        at_most: maximum requests in flight, or a limiter that is shared with another policy; ``None`` for no limit.
        stop_token_ids: ids that end a reply, in addition to the stop ids of each call.
        extras: columns that each completion needs beyond tokens and logprobs; ``inner`` must accept them. Routed
            experts are requested once for each position of a session.
        backoff_seconds: delay between attempts if a server aborts before the first token.
    """

    def __init__(
        self,
        inner: InterruptiblePolicy,
        *,
        decode: Decode | None = None,
        at_most: int | anyio.CapacityLimiter | None = None,
        stop_token_ids: tuple[int, ...] = (),
        extras: ExtrasRequest | None = None,
        backoff_seconds: float = 0.5,
    ) -> None:
        super().__init__(inner)
        self._backoff_seconds = backoff_seconds
        self._extras = extras
        self._routed: OrderedDict[str, int] = OrderedDict()
        """Number of positions of each session whose routed experts are known."""
        self.inner: InterruptiblePolicy = inner
        self.decode = decode
        self.stop_token_ids = stop_token_ids
        self.resumed = 0
        """Number of times a completion was continued after an interruption."""
        self.in_flight = 0
        self._opened: anyio.Event | None = None  # only while it is paused: each rollout has one policy
        self._idle: anyio.Event | None = None
        self.limiter = anyio.CapacityLimiter(at_most) if isinstance(at_most, int) else at_most

    def __repr__(self) -> str:
        state = "paused" if self.paused else "open"
        return f"<ResumablePolicy {state}: {self.in_flight} in flight, {self.resumed} resumed>"

    @property
    def paused(self) -> bool:
        return self._opened is not None

    def resume(self) -> None:
        """Let waiting and new calls sample again."""
        if self._opened is not None:
            self._opened.set()
            self._opened = None

    async def pause(self, *, seconds: float = 60.0) -> None:
        """Interrupt all requests, let new requests wait, and return when no request is in flight.

        Raises:
            EndpointUnavailable: requests were still in flight after ``seconds``.
        """
        if self._opened is None:
            self._opened = anyio.Event()
        with boundary(EndpointUnavailable, f"stopping {self.in_flight} requests", seconds=seconds):
            while self.in_flight:
                self._idle = anyio.Event()
                await self.inner.interrupt()
                with anyio.move_on_after(_INTERRUPT_SECONDS):
                    if self.in_flight:
                        await self._idle.wait()

    async def complete(self, request: CompletionRequest) -> Completion:
        """See :class:`rollouts.inference.base.Policy`; ``finish_reason`` is never ``"abort"``.

        Raises:
            ConfigError: there are stop strings, but no ``decode`` to find a stop string that spans an interruption.
        """
        tokens, sampling = request.tokens, request.sampling
        if sampling.stop and self.decode is None:
            expected = "none, or ResumablePolicy(decode=...): a stop string may span an interruption"
            raise ConfigError.of("SamplingParams.stop", sampling.stop, expected)
        if self.stop_token_ids or self._extras is not None:
            request = self._extended(request)
        parts: list[Completion] = []
        sampled, empty = 0, 0
        while sampled < sampling.max_new_tokens:
            if parts:
                from rollouts.inference.reply_parts import rest_of  # here: few replies have several parts

                ids = np.concatenate([tokens, *(part.tokens for part in parts)])
                request = attrs.evolve(
                    request, tokens=ids, sampling=rest_of(sampling, sampled), extras=self._extras_of(request)
                )
            borrower = None if self._opened is None and self.limiter is None else await self._take_slot()
            self.in_flight += 1
            try:
                part = await self.inner.complete(request)
            finally:
                self.in_flight -= 1
                if not self.in_flight and self._idle is not None:
                    self._idle.set()
                if borrower is not None:
                    self._return_slot(borrower)
            if parts or part.finish_reason == "abort":
                part = self._until_stop(request.tokens[len(tokens) :], part, sampling, request.stop_token_ids)
            if part.extras is not None:
                self._note_routed(request.session, part.extras)
            parts.append(part)
            sampled += len(part.tokens)
            if part.finish_reason != "abort":
                break
            if sampling.constrained:  # a server would begin its grammar in the middle of the reply
                parts, sampled = [], 0
            self.resumed += 1
            empty = 0 if len(part.tokens) or self.paused else empty + 1
            if empty:
                if empty >= _EMPTY_ABORTS:
                    raise EndpointUnavailable(f"the server aborted a request {empty} times before its first token")
                await anyio.sleep(self._backoff_seconds)
        return parts[0] if len(parts) == 1 and parts[0].finish_reason != "abort" else _joined(parts)

    def _extended(self, request: CompletionRequest) -> CompletionRequest:
        """Add the stop ids and the extras of this policy to a request."""
        stops = tuple(dict.fromkeys((*request.stop_token_ids, *self.stop_token_ids)))
        return attrs.evolve(request, stop_token_ids=stops, extras=self._extras_of(request))

    def _until_stop(
        self, before: TokenColumn, part: Completion, sampling: SamplingParams, stop_token_ids: tuple[int, ...]
    ) -> Completion:
        from rollouts.inference.reply_parts import until_stop

        unstopped = sampling.min_new_tokens if getattr(self.inner, "minimum_delays_stops", False) else 0
        return until_stop(before, part, sampling.stop, stop_token_ids, self.decode, unstopped=unstopped)

    def _note_routed(self, session: str, extras: Extras) -> None:
        """Record the positions whose routed experts are known."""
        if session and extras.experts is not None:
            self._routed.pop(session, None)
            self._routed[session] = extras.experts_start + len(extras.experts)
            if len(self._routed) > _MOST_SESSIONS:
                self._routed.popitem(last=False)  # its next request gets all rows again

    def _extras_of(self, request: CompletionRequest) -> ExtrasRequest | None:
        """The extras of the next request of a session."""
        known = self._routed.get(request.session, 0)
        if self._extras is None:
            return request.extras
        return attrs.evolve(self._extras, experts_start=known) if known else self._extras

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until the policy is open, and for one of the ``at_most`` places; deadlines are paused meanwhile.

        Also for other code that sends requests to the same servers.
        """
        borrower = await self._take_slot()
        try:
            yield
        finally:
            self._return_slot(borrower)

    async def _take_slot(self) -> object:
        borrower = object()
        while True:
            if self.paused:
                with boundary(EndpointUnavailable, "paused between batches", kind="a_pause"), paused_deadlines():
                    while self._opened is not None:
                        await self._opened.wait()
            if self.limiter is None:
                return borrower
            try:
                self.limiter.acquire_on_behalf_of_nowait(borrower)
                return borrower
            except anyio.WouldBlock:
                with paused_deadlines():
                    await self.limiter.acquire_on_behalf_of(borrower)
            if not self.paused:
                return borrower
            self.limiter.release_on_behalf_of(borrower)

    def _return_slot(self, borrower: object) -> None:
        if self.limiter is not None:
            self.limiter.release_on_behalf_of(borrower)


def _joined(parts: list[Completion]) -> Completion:
    """Join the parts of one reply; prompt fields are from the first request."""
    versions: list[VersionSpan] = []
    start = 0
    for part in parts:
        versions += [VersionSpan(span.version, start + span.start, start + span.stop) for span in part.versions]
        start += len(part.tokens)
    last = parts[-1]
    extras = [part.extras for part in parts if part.extras is not None]
    return Completion(
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        finish_reason="length" if last.finish_reason == "abort" else last.finish_reason,
        versions=versions,
        prompt_tokens=parts[0].prompt_tokens,
        prompt_digest=parts[0].prompt_digest,
        request_id=last.request_id,
        cached_tokens=parts[0].cached_tokens,
        seconds=sum(part.seconds for part in parts),
        waited=sum(part.waited for part in parts),
        server=last.server,
        logprobs_of=last.logprobs_of,
        extras=Extras.joined(extras) if extras else None,
    )
