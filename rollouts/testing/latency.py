"""Latency of a stub's generations: a lognormal time to the first token, and a time for each token.

Invariant: the seconds depend only on the seed and the order of the calls. This module does not know connections.
"""

from __future__ import annotations

import math
import random

import anyio
import attrs

from rollouts.testing.replies import Request

__all__ = ["Latency"]


@attrs.define
class Latency:
    """Random seconds of a generation. ``StubServer(latency=…)`` takes an instance."""

    median: float
    """Median seconds until the first token."""
    sigma: float = 0.0
    """Standard deviation of their logarithm."""
    per_token: float = 0.0
    """Further seconds for each token of the reply."""
    seed: int = 0
    _rng: random.Random = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def seconds(self, tokens: int) -> float:
        """Draw the seconds of the next generation, with this number of tokens."""
        first = self._rng.lognormvariate(math.log(self.median), self.sigma) if self.median else 0.0
        return first + self.per_token * tokens

    async def __call__(self, request: Request) -> None:
        await anyio.sleep(self.seconds(request.sampling_params.get("max_new_tokens", 0)))
