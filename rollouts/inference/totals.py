"""Counters of a policy."""

from __future__ import annotations

import attrs

from rollouts.dtypes import Completion

__all__ = ["Totals"]


@attrs.define
class Totals:
    """Counters of a policy."""

    requests: int = 0
    """Requests for a completion, including retries."""
    retries: int = 0
    aborts: int = 0
    """Aborts that a server acknowledged."""
    completions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    encoded_tokens: int = 0
    """Prompt ids encoded as JSON: only the new ids of each call of a session."""
    encoded_images: int = 0
    """Images encoded as JSON: each once."""

    def add(self, completion: Completion) -> None:
        """Count a completion and its tokens."""
        self.completions += 1
        self.prompt_tokens += completion.prompt_tokens
        self.cached_tokens += completion.cached_tokens
        self.sampled_tokens += len(completion.tokens)
