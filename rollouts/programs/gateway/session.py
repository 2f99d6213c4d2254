"""One session: the calls of one program, answered with exact token ids.

A session reads a request, finds out whether it is a retry, and has it answered. It keeps the laws of
:mod:`rollouts.programs.gateway.tree` and :mod:`rollouts.programs.gateway.requests`, and one more, Said: a field that is
not honoured is a count in :attr:`ProgramSession.counts`.

Invariant: after the end of the session no call begins.

This module knows no wire format and no HTTP.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import attrs

from rollouts.concurrency.deadlines import deadline
from rollouts.dtypes import OnRewrite, SamplingParams, StopReason
from rollouts.errors import ConfigError, EndpointAway, Failure, GenerateFailure, HistoryRewritten, ReplyRefused
from rollouts.inference.base import Policy
from rollouts.programs.gateway.answers import Answers
from rollouts.programs.gateway.call_ids import CallIds
from rollouts.programs.gateway.contexts import Contexts
from rollouts.programs.gateway.requests import OpenRequest, OpenRequests
from rollouts.programs.gateway.tool_sets import ToolSets
from rollouts.programs.gateway.tree import Call, Training, Tree
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest, SessionLimits
from rollouts.renderer import Renderer
from rollouts.trajectory import Trajectory

__all__ = ["ProgramSession", "SessionLimits"]

_MAX_COUNTS = 256
"""Names of counts of one session; the rest is one count, because a program may send any name as a tool's type."""
_MAX_BODY = 1 << 26
_LEAST_BODY = 1 << 22
_BYTES_OF_TOKEN = 256
"""Of a request: a token of text is about 4 bytes, 6 times as many where each is escaped, and white space is longer."""
_NO_EFFECT: Mapping[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
"""The values of the parameters that a run does not have."""


class ProgramSession:
    """The session of one program; used as an async context manager, which owns its generations.

    Args:
        policy: samples the replies.
        renderer: converts messages to tokens and back.
        sampling: parameters of each request, in place of the program's. ``max_new_tokens`` is the most of one reply. A
            ``seed`` is mixed with the name of the session and the number of the call.
        key: the secret of the session; random by default.
        name: of the rollout, for seeds.
        max_context: context length of the model in tokens, prompt and reply together; ``None``: unlimited.
        limits: when the session ends.
        training: which replies are trained.
        history: what to do where a program changes a reply that it sends back, with the same call ids: ``"append"``
            continues from the kept ids, ``"fork"`` opens a root that shows the reply as the program does, ``"error"``
            fails the session.
        retry_seconds: how long a generation continues without a client, for a retry of its call. SDKs wait up to 8 s.

    Attributes:
        tree: the calls.
        counts: what happened, and what was not honoured, by name.
        max_body: the most bytes of a request: a longer one would not fit the context, unless it is of images.
        stop_reason: why the session ended; ``None`` while it takes calls.
        over: set when the session has ended.
    """

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        sampling: SamplingParams,
        *,
        key: str | None = None,
        name: str = "",
        max_context: int | None = None,
        limits: SessionLimits | None = None,
        training: Training | None = None,
        history: OnRewrite = "append",
        retry_seconds: float = 10.0,
    ) -> None:
        self.key = os.urandom(16).hex() if key is None else key
        self.tree = Tree()
        self.counts: Counter[str] = Counter()
        self.max_body = _max_body(max_context if renderer.images is None else None)
        self.stop_reason: StopReason | None = None
        self.failure: Failure | None = None
        self.over = anyio.Event()
        training = training or Training()
        # The run's own form is that of all replies.
        self._training = attrs.evolve(training, constrained="train") if sampling.constrained else training
        enforces = training.constrained != "free"
        strict = enforces and training.strict_tools == "enforce"
        self._limits = limits or SessionLimits()
        self._ends = time.monotonic() + self._limits.max_seconds
        self._error: Exception | None = None
        self._names_agents = False
        """Whether the first request had a lineage."""
        self._requests = OpenRequests(self.tree, retry_seconds)
        common = policy, renderer, self.tree, CallIds(), self.counts
        self._contexts = Contexts(*common, ToolSets(renderer), self._limits.max_roots, history)
        self._answers = Answers(*common, self._contexts, sampling, name, max_context, self._limits, enforces, strict)

    def __repr__(self) -> str:
        state = self.stop_reason or f"{len(self._requests)} requests under way"
        return f"<ProgramSession {self._answers.name} {self.tree!r}, {state}>"

    async def __aenter__(self) -> Self:
        await self._requests.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.end()
        return await self._requests.__aexit__(kind, error, trace)

    # -- the server's side --------------------------------------------------------------------------------------------

    @property
    def rewrites(self) -> list[tuple[int, str]]:
        """Of the first roots that share a beginning with an earlier conversation: the number of the message that
        differs, and its text."""
        return self._contexts.rewrites

    @property
    def overflowed(self) -> bool:
        """Whether the last call did not fit the context of the model."""
        return self._answers.overflowed

    @property
    def denied(self) -> Failure | None:
        """The failure of a call that the model's server did not answer, and that was not repeated with success."""
        return next(iter(self._answers.denied.values()), None)

    @property
    def no_images(self) -> str:
        """Why the model takes no images; empty if it does."""
        return self._contexts.no_images

    @property
    def ended(self) -> bool:
        """Whether the session takes no more calls."""
        return self.stop_reason is not None

    def end(self, stop_reason: StopReason = StopReason.TASK_COMPLETED, failure: Failure | None = None) -> None:
        """End the session: its generations are aborted, and later calls are refused. The first reason counts."""
        if self.stop_reason is None:
            self.stop_reason, self.failure = stop_reason, failure
            self.over.set()
            self._requests.abort()

    def fail(self, error: Exception) -> None:
        """End the session with an error of the gateway itself, which :meth:`branches` raises."""
        self._error = self._error or error
        self.end(StopReason.FAILED, Failure.of(error))

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a count of the session."""
        self.counts[name] += amount  # type: ignore[assignment]  # some counts are of seconds

    def reply(self, reply_id: str) -> CallReply | None:
        """An earlier reply by its id."""
        call = self.tree.call_of(reply_id)
        return None if call is None else call.reply

    def delivered(self, replies: Sequence[CallReply]) -> None:
        """Note that the program got these replies: the same request again is a request for other replies."""
        for call in self._calls_of(replies):
            self.tree.delivered(call)

    def undelivered(self, replies: Sequence[CallReply]) -> None:
        """Note that the client of these replies went away: the same request again is a retry, and gets them."""
        for call in self._calls_of(replies):
            self.tree.not_delivered(call)

    def _calls_of(self, replies: Sequence[CallReply]) -> list[Call]:
        return [call for reply in replies if (call := self.tree.call_of(reply.id)) is not None]

    async def count_tokens(self, request: CallRequest) -> int:
        """Length in ids of an opening with these messages and tools."""
        return await self._contexts.count_tokens(request)

    async def call(self, request: CallRequest, *, lineage: Mapping[str, str], attempt: int = 0) -> list[CallReply]:
        """See :class:`~rollouts.programs.gateway.types.Session`; requests with different ``lineage`` are different.

        Raises:
            ApiError: the request is refused or cannot be answered; ``conflict`` if the session has ended.
            TokenMismatchError: a law was broken.
        """
        conversation = await self._contexts.read(request)
        self._check_open()
        self._contexts.conversations.keep(conversation)
        self._count_request(request)
        if not self._answers.numbered and not len(self._requests) and lineage:
            self._names_agents = True
        by_hand = self._names_agents and not lineage
        if by_hand:
            self.count("calls_by_hand")
        tools_key = self._contexts.tools.key(request.tools)
        new = OpenRequest(request, conversation, request.tools, tools_key, dict(lineage), by_hand, attempt)
        if (earlier := self._requests.repeated(new)) is not None:
            self.count("retries_joined")
            return await self._requests.replies_of(earlier)
        if kept := self.tree.take_kept(new.retry_key, request.n):
            self.count("retries_served")
            return [call.reply for call in kept]
        self._check_calls(request.n)
        self._requests.start(new, self._answer)
        return await self._requests.replies_of(new)

    def branches(self) -> list[Trajectory]:
        """Return the sealed branches of an ended session; the last one has the counts.

        Raises:
            TokenMismatchError: a law is broken.
            ConfigError: the template or the dialect cannot serve the tools of the program.
            EndpointAway: no server answered for too long.
        """
        if self._error is not None:
            raise self._error
        reason = None if self.stop_reason is StopReason.TASK_COMPLETED else self.stop_reason
        branches = self.tree.branches(reason, self.failure, training=self._training, history=self._contexts.history)
        if branches:
            for name, amount in self.metrics().items():
                branches[-1].count(name, amount)
        return branches

    def metrics(self) -> dict[str, float]:
        """The counts, with the numbers of calls, roots and sampled ids, and of these the not trained ones by reason."""
        untrained = {f"untrained_tokens/{reason}": amount for reason, amount in self.tree.untrained.items()}
        tree = {"calls": len(self.tree.calls), "roots": len(self.tree.roots), "sampled_tokens": self.tree.sampled}
        return {**self.counts, **tree, **untrained}

    # -- one request --------------------------------------------------------------------------------------------------

    def _count_request(self, request: CallRequest) -> None:
        """Count what a request asks for and does not get."""
        for name, amount in request.counts.items():  # some names are from the request
            self.count(name if name in self.counts or len(self.counts) < _MAX_COUNTS else "other_counts", amount)
        for name, value in request.sampling.items():
            in_run = getattr(self._answers.sampling, name, _NO_EFFECT.get(name))
            if name == "seed" or value != in_run:  # each call has its own seed
                self.count(f"sampling_overridden/{name}")

    def _check_open(self) -> None:
        most = self._limits.max_sampled_tokens
        if time.monotonic() > self._ends:
            self.end(StopReason.DEADLINE)
        if most is not None and self.tree.sampled >= most:
            self.end(StopReason.MAX_TOKENS)
        self._check_not_ended()

    def _check_calls(self, n: int) -> None:
        """End the session at one call too many; retries do not count."""
        most = self._limits.max_calls
        if most is not None and n > most:
            raise ApiError("invalid_request", f"n: got {n}; expected at most {most}, the calls of the session")
        if most is not None and self._answers.numbered + self._requests.unnumbered + n > most:
            self.end(StopReason.MAX_TURNS)
        self._check_not_ended()

    def _check_not_ended(self) -> None:
        if self.ended:
            raise ApiError("conflict", f"the session has ended: {self.stop_reason}")

    async def _answer(self, request: OpenRequest) -> None:
        """Answer a request; errors go to the calls that wait for it."""
        limit = deadline(self._ends - time.monotonic())
        try:
            with request.scope, limit:
                await self._answers.answer(request)
            if limit.expired:
                self.end(StopReason.DEADLINE)
            if request.missing:
                self.count("cut_off" if request.waiting else "undelivered", request.missing)
        except ApiError as error:
            request.error = error
        except (ConfigError, EndpointAway) as error:
            self.fail(error)
            request.error = ApiError("conflict", f"the session has failed: {error}")
        except ReplyRefused as error:
            self.end(StopReason.MALFORMED_REPLY)
            request.error = ApiError("conflict", f"the session has ended: {error}")
        except (GenerateFailure, HistoryRewritten) as error:
            self.end(StopReason.FAILED, Failure.of(error))
            request.error = ApiError("conflict", f"the session has failed: {error}")
        except Exception as error:  # noqa: BLE001 - a broken law or an error of a policy: the waiting calls raise it
            self.fail(error)
            request.error = error
        finally:
            if request.error is None and request.missing:  # the task group of the session is cancelled
                request.error = ApiError("conflict", "the session has ended")
            self._requests.finish(request)


def _max_body(max_context: int | None) -> int:
    return _MAX_BODY if max_context is None else min(max(max_context * _BYTES_OF_TOKEN, _LEAST_BODY), _MAX_BODY)
