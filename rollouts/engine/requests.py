"""A request to the engine and its progress: one request, one sequence.

Invariant: ``tokens`` is the prompt followed by the sampled tokens; ``logprobs`` has one entry for each sampled token;
``spans`` covers the sampled tokens without gaps. Only the engine thread writes; others may read appended values.

This module does not know models or the protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs

from rollouts.engine.adapters import Adapter

__all__ = ["Request", "Rules"]


@attrs.frozen
class Rules:
    """Sampling parameters and stop conditions of a request."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """1 is greedy; a value below 1 sets no limit."""
    min_p: float = 0.0
    limit: int = 128
    """Maximum number of new tokens; 0 only computes the prompt."""
    minimum: int = 0
    """Number of new tokens before a stop token may be sampled."""
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the reply, including the model's stop ids."""
    bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of some ids."""
    seed: int = 0
    """Determines every draw, together with the distribution."""

    @property
    def shapes_logits(self) -> bool:
        """Whether the logits are modified before the softmax."""
        return bool(self.bias) or self.minimum > 0


@attrs.define(eq=False)
class Request:
    """One sequence in progress. The first ``prompt_tokens`` of its ``tokens`` are the prompt."""

    rid: str
    tokens: list[int]
    rules: Rules
    notify: Callable[[Request], None]
    """Called in the event loop when the request ends, and after each token if ``stream`` is set."""
    score_from: int = -1
    """First prompt position with logprobs in the response; -1 for none."""
    namespace: str = ""
    """Only requests of one namespace share cached prefixes."""
    adapter: Adapter | None = None
    """The LoRA adapter of its tokens, prompt included."""
    stream: bool = False
    tops: int = 0
    """Number of the most probable ids whose logprobs each token with a logprob has in the response."""
    prompt_tokens: int = attrs.field(init=False)
    logprobs: list[float] = attrs.field(factory=list)
    prompt_logprobs: list[float] = attrs.field(factory=list)
    """Logprobs of the prompt tokens after ``score_from``."""
    prompt_tops: list[list[tuple[float, int, None]]] = attrs.field(factory=list)
    """For each of ``prompt_logprobs``, if there are ``tops``: as ``top_logprobs``."""
    top_logprobs: list[list[tuple[float, int, None]]] = attrs.field(factory=list)
    """For each sampled token, if there are ``tops``: logprob and id of the most probable ones, descending."""
    spans: list[tuple[str, int]] = attrs.field(factory=list)
    """(weight version, offset of its first sampled token), ascending."""
    cached_tokens: int = 0
    retractions: int = 0
    started: bool = False
    finish: dict[str, Any] | None = None
    """The finish reason in the protocol's format; set last, and once."""
    arrived: float = attrs.field(factory=time.perf_counter)

    def __attrs_post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt logprobs are to be computed: they are requested, and no token is sampled yet."""
        return self.score_from >= 0 and not self.logprobs

    def mark_version(self, version: str) -> None:
        """Attribute all tokens sampled from now on to ``version``."""
        at = len(self.logprobs)
        if self.spans and self.spans[-1][1] == at:
            self.spans.pop()
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, at))
