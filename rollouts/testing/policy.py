"""A scripted policy, for tests of environments, agents and recipes without a model.

Invariant: it is a real :class:`~rollouts.inference.base.Policy`: its completions pass every check of a server's reply,
and it records its requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import anyio.lowlevel
import attrs

from rollouts.dtypes import (
    Completion,
    FinishReason,
    ImageSpan,
    TokenColumn,
    VersionSpan,
    digest,
    packed_tokens,
)
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import EndpointRefused
from rollouts.inference.base import CompletionRequest, ServerInfo

__all__ = ["Reply", "ScriptedPolicy"]


@attrs.frozen
class Reply:
    """One scripted reply."""

    tokens: Sequence[int]
    finish_reason: FinishReason = "stop"
    versions: Sequence[VersionSpan] = ()
    """Policy versions of the tokens; by default ``"scripted"`` for all."""


Script = Iterable[Reply | Sequence[int]] | Callable[[TokenColumn], Reply | Sequence[int]]


class ScriptedPolicy:
    """A policy that returns scripted replies: a sequence, or a function of the prompt's tokens.

    A reply longer than ``max_new_tokens`` is cut, as by a server. Logprobs are ``-1 / (1 + position)``.

    Attributes:
        requests: the prompt tokens of every call, in order.
        sessions: the session and the route of every call, in order.
        images: the images of every call, in order.
    """

    takes_images = True

    def __init__(self, script: Script, *, max_context: int | None = None) -> None:
        self._next = script if callable(script) else _in_order(script)
        self._max_context = max_context
        self.requests: list[TokenColumn] = []
        self.sessions: list[tuple[str, str]] = []
        self.images: list[tuple[ImageSpan, ...]] = []
        self.closed = False
        self._name = os.urandom(8).hex()  # of its requests, which no other policy of any process has

    def __repr__(self) -> str:
        return f"<ScriptedPolicy after {len(self.requests)} calls>"

    async def complete(self, request: CompletionRequest) -> Completion:
        await anyio.lowlevel.checkpoint()
        tokens, most = request.tokens, request.sampling.max_new_tokens
        self.requests.append(tokens)
        self.sessions.append((request.session, request.route))
        self.images.append(tuple(request.images))
        answer = self._next(tokens)
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        sampled = packed_tokens(reply.tokens)[:most]
        cut = len(sampled) < len(reply.tokens)
        versions = reply.versions or [VersionSpan("scripted", 0, len(reply.tokens))]
        return Completion(
            tokens=sampled,
            logprobs=-1 / (1 + np.arange(len(sampled))),
            finish_reason="length" if cut else reply.finish_reason,
            versions=[
                VersionSpan(span.version, span.start, min(span.stop, len(sampled)))
                for span in versions
                if span.start < len(sampled)
            ],
            prompt_tokens=len(tokens),
            prompt_digest=digest(tokens),
            request_id=f"scripted-{self._name}-{len(self.requests)}",
        )

    async def describe(self) -> ServerInfo:
        return ServerInfo(version="scripted", model="scripted", max_context=self._max_context)

    async def aclose(self) -> None:
        self.closed = True


def _in_order(script: Iterable[Reply | Sequence[int]]) -> Callable[[TokenColumn], Reply | Sequence[int]]:
    replies = iter(script)

    def following(tokens: TokenColumn) -> Reply | Sequence[int]:
        try:
            return next(replies)
        except StopIteration:
            raise EndpointRefused("the script has no further reply") from None

    return following
