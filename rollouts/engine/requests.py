"""What the engine is asked to do, and how far it got: one request, one sequence.

Invariant: ``tokens`` is the prompt followed by what was sampled, and ``logprobs`` has one entry for each sampled token;
``spans`` covers the sampled tokens without a gap. Only the engine thread writes; others may read what is appended.

This module knows no model and no protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs

__all__ = ["Request", "Rules"]


@attrs.frozen
class Rules:
    """How a request is sampled and when it ends."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """1 is greedy, below 1 no limit."""
    min_p: float = 0.0
    limit: int = 128
    """New tokens at most; 0 only computes the prompt."""
    minimum: int = 0
    """New tokens before a stop token may be sampled."""
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the reply, those of the model included."""
    bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of some ids."""
    seed: int = 0
    """Decides every draw of the request, together with the distribution it is drawn from."""

    @property
    def shapes_logits(self) -> bool:
        """The logits are changed before the softmax."""
        return bool(self.bias) or self.minimum > 0


@attrs.define(eq=False)
class Request:
    """One sequence on its way. ``prompt_tokens`` of its ``tokens`` were given."""

    rid: str
    tokens: list[int]
    rules: Rules
    notify: Callable[[Request], None]
    """Called in the event loop when the request has ended, and after each token when ``stream`` is set."""
    score_from: int = -1
    """Prompt position from which logprobs of the prompt are wanted; -1 is none."""
    namespace: str = ""
    """Only requests of one namespace share cached prefixes."""
    stream: bool = False
    prompt_tokens: int = attrs.field(init=False)
    logprobs: list[float] = attrs.field(factory=list)
    prompt_logprobs: list[float] = attrs.field(factory=list)
    """Of the prompt tokens after ``score_from``."""
    spans: list[tuple[str, int]] = attrs.field(factory=list)
    """(weight version, position of the first sampled token that is its own), ascending."""
    cached_tokens: int = 0
    retractions: int = 0
    started: bool = False
    finish: dict[str, Any] | None = None
    """The finish reason as the protocol writes it; set last, and once."""
    arrived: float = attrs.field(factory=time.perf_counter)

    def __attrs_post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """Logprobs of the prompt are wanted, and nothing was sampled yet."""
        return self.score_from >= 0 and not self.logprobs

    def mark_version(self, version: str) -> None:
        """What is sampled from now on belongs to ``version``."""
        at = len(self.logprobs)
        if self.spans and self.spans[-1][1] == at:
            self.spans.pop()
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, at))
