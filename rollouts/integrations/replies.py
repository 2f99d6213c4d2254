"""A policy over the inference engine of a trainer: the part that all trainers share.

Invariant: an empty or misaligned reply is an error of the endpoint, never a completion; a parameter without a place in
the trainer's request is refused by name. This module knows no trainer.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs

from rollouts.dtypes import CONSTRAINTS, Completion, FinishReason, SamplingParams, TokenColumn, VersionSpan
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, ContextOverflow, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import CompletionRequest, ServerInfo, check_takes_images
from rollouts.trajectory import digest

__all__ = ["Reply", "TrainerPolicy"]


@attrs.frozen(kw_only=True)
class Reply:
    """The reply of an engine."""

    tokens: Sequence[int]
    logprobs: Sequence[float] | None
    stopped_by: str | None
    """``"stop"``, ``"length"``, ``"abort"``, or another word of the engine for a stop."""
    version: int | str | Sequence[int]
    """The version of the weights: one for all tokens, or one for each."""
    cached_tokens: int = 0
    seconds: float = 0.0


class TrainerPolicy:
    """A policy over the inference engine of a trainer. A subclass sends the request, in :meth:`sample`."""

    trainer: ClassVar[str]
    """Its name, for messages."""
    unsupported: ClassVar[tuple[str, ...]]
    """Fields of :class:`SamplingParams` that its request has no place for."""
    takes_images: ClassVar[bool] = False
    """Whether its requests may have images: then :meth:`sample` has the argument ``images``."""
    max_context: int | None = None
    """The context of the model, if known."""

    async def sample(
        self, tokens: TokenColumn, sampling: SamplingParams, stop_token_ids: tuple[int, ...], session: str
    ) -> Reply:
        """Send one request for at most ``sampling.max_new_tokens`` ids.

        ``session`` is equal for the requests that should go to one server.
        """
        raise NotImplementedError

    def budget(self, tokens: TokenColumn, sampling: SamplingParams, session: str) -> int:
        """The maximum length of the next reply of a sequence.

        Raises:
            ContextOverflow: prompt and reply do not fit the context.
        """
        if self.max_context is not None and len(tokens) + sampling.max_new_tokens > self.max_context:
            needed = f"{len(tokens)} prompt tokens and max_new_tokens={sampling.max_new_tokens}"
            raise ContextOverflow(f"{needed} exceed the context of {self.max_context} tokens")
        return sampling.max_new_tokens

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one continuation.

        Raises:
            ConfigError: a parameter is set, or there are images, that the trainer's request has no place for.
            ContextOverflow: prompt and reply do not fit the context.
            EndpointUnavailable: the engine returned no token.
            EndpointRefused: it did not return one logprob for each token.
        """
        tokens, sampling = request.tokens, request.sampling
        if request.images:
            check_takes_images(self)
        for name in (*self.unsupported, *CONSTRAINTS):
            value, default = getattr(sampling, name), getattr(_DEFAULTS, name)
            if value != default:
                raise ConfigError.of(
                    f"SamplingParams.{name}", value, f"{default!r}: {self.trainer} has no field for it"
                )
        budget = self.budget(tokens, sampling, request.session)
        sampling = attrs.evolve(sampling, max_new_tokens=budget)
        images: dict[str, Any] = {"images": request.images} if request.images else {}
        reply = await self.sample(tokens, sampling, request.stop_token_ids, request.route or request.session, **images)
        count = len(reply.tokens)
        if not count:
            raise EndpointUnavailable(f"{self.trainer} returned 0 tokens, stop reason {reply.stopped_by!r}")
        if reply.logprobs is None or len(reply.logprobs) != count:
            got = "no logprobs" if reply.logprobs is None else f"{len(reply.logprobs)} logprobs"
            raise EndpointRefused(f"{self.trainer} returned {count} tokens and {got}; expected one for each")
        cut = reply.stopped_by == "length" or (reply.stopped_by != "stop" and count >= budget)
        finish: FinishReason = "abort" if reply.stopped_by == "abort" else "length" if cut else "stop"
        try:
            return Completion(
                tokens=reply.tokens,
                logprobs=reply.logprobs,
                finish_reason=finish,
                versions=_spans(reply.version, count),
                prompt_tokens=len(tokens),
                prompt_digest=digest(tokens),
                request_id=uuid.uuid4().hex,
                cached_tokens=reply.cached_tokens,
                seconds=reply.seconds,
            )
        except ValueError as error:
            raise EndpointRefused(f"{self.trainer}: {error}") from error

    async def describe(self) -> ServerInfo:
        return ServerInfo(max_context=self.max_context)

    async def aclose(self) -> None:
        return None


_DEFAULTS = SamplingParams()


def _spans(version: int | str | Sequence[int], count: int) -> list[VersionSpan]:
    """Runs of equal versions of tokens."""
    if isinstance(version, int | str):
        return [VersionSpan(str(version), 0, count)]
    column = np.array(version, np.int64)
    edges = [0, *(np.flatnonzero(column[1:] != column[:-1]) + 1).tolist(), count]
    return [VersionSpan(str(column[start]), start, stop) for start, stop in itertools.pairwise(edges)]
