"""Latencies of stubs: determined by the seed, with the configured median."""

from __future__ import annotations

import statistics

import anyio

from rollouts.testing.latency import Latency
from rollouts.testing.replies import Request


def test_seconds_have_their_median_and_grow_with_the_tokens() -> None:
    """A lognormal time to the first token, and a time for each token."""
    latency = Latency(2.0, sigma=0.5, per_token=0.25)
    drawn = [latency.seconds(4) for _ in range(2001)]
    assert abs(statistics.median(drawn) - 3.0) < 0.15
    assert drawn[:5] == [again.seconds(4) for again in [Latency(2.0, sigma=0.5, per_token=0.25)] for _ in range(5)]


async def test_a_stub_awaits_it() -> None:
    """As its ``latency``, by the budget of the request."""
    began = anyio.current_time()
    await Latency(0.0, per_token=0.01)(Request("r", [1], {"max_new_tokens": 5}, {}, {}))
    assert anyio.current_time() - began >= 0.05
