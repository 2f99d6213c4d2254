"""What a policy is: tokens in, tokens out.

A policy knows no message, no environment and no sample. Whatever it cannot serve it says with an ``EndpointError``.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from rollouts.dtypes import Completion, SamplingParams, TokenColumn

__all__ = ["Policy", "ServerInfo"]


@attrs.frozen
class ServerInfo:
    """What a server says of itself; ``None`` where it does not say."""

    version: str | None = None
    model: str | None = None
    weight_version: str | None = None
    max_context: int | None = None
    """Prompt and reply together, in tokens."""


class Policy(Protocol):
    """Samples continuations of token sequences."""

    async def complete(
        self, tokens: TokenColumn, sampling: SamplingParams, *, stop_token_ids: tuple[int, ...] = (), session: str = ""
    ) -> Completion:
        """Sample one continuation of ``tokens``.

        Args:
            tokens: ids, shape ``(n,)``, n >= 1; sent as they are.
            sampling: how to sample; ``max_new_tokens`` is the budget of this reply.
            stop_token_ids: ids that end the reply, in addition to the model's own.
            session: names the sequence; calls of one session only ever extend its tokens, so they go to one worker.

        Raises:
            EndpointUnavailable: no answer worth keeping, after all retries.
            EndpointRefused: the server will not serve this request.
            ContextOverflow: prompt and budget do not fit the model's context.
        """
        ...

    async def describe(self) -> ServerInfo:
        """Ask the server what it is.

        Raises:
            EndpointUnavailable: nobody answers there.
            EndpointRefused: somebody answers who does not speak the protocol.
        """
        ...

    async def aclose(self) -> None:
        """Close connections; in-flight completions must have ended."""
        ...
