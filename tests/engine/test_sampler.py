from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from rollouts.engine.sampler import Draws, sample, uniforms  # noqa: E402 - only where torch is


def draws(rows: int, **changes: object) -> Draws:
    values = {
        "temperature": np.ones(rows, np.float32),
        "top_p": np.ones(rows, np.float32),
        "top_k": np.full(rows, -1),
        "min_p": np.zeros(rows, np.float32),
        "seed": np.arange(rows, dtype=np.uint64),
        "position": np.zeros(rows, np.int64),
    }
    for name, value in changes.items():
        values[name] = np.full(rows, value, dtype=values[name].dtype)
    return Draws(**values)


def logits(rows: int = 1) -> torch.Tensor:
    return torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0]).repeat(rows, 1)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_a_draw_lies_strictly_between_0_and_1(seed: int, position: int) -> None:
    """So that a token without probability is never drawn."""
    value = uniforms(np.array([seed], np.uint64), np.array([position]))[0]
    assert 0 < value < 1
    assert value == uniforms(np.array([seed], np.uint64), np.array([position]))[0]


@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_are_uniform_over_seeds_and_over_positions(by: str) -> None:
    """Neighbouring counters give independent draws: all bins of a histogram are filled alike."""
    count = np.arange(100_000)
    fixed = np.full(len(count), 7)
    seed, position = (count, fixed) if by == "seed" else (fixed, count)
    values = uniforms(seed.astype(np.uint64), position)
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert np.abs(counts - 2000).max() < 250
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    """The frequencies of 40 000 draws are the softmax at that temperature."""
    tokens, _ = sample(logits(40_000), draws(40_000, temperature=0.7))
    frequencies = torch.bincount(tokens, minlength=6) / 40_000
    assert torch.allclose(frequencies, (logits()[0] / 0.7).softmax(-1), atol=0.01)


def test_the_logprob_is_that_of_the_tempered_and_untruncated_distribution() -> None:
    """The logprob includes the temperature, but not top-k, top-p and min-p."""
    tokens, logprobs = sample(logits(50), draws(50, temperature=0.5, top_k=3, top_p=0.9, min_p=0.01))
    expected = (logits()[0] / 0.5).log_softmax(-1)[tokens]
    assert torch.allclose(expected, logprobs)


@pytest.mark.parametrize(
    ("limit", "support"), [({"top_k": 2}, {0, 1}), ({"top_p": 0.7}, {0, 1}), ({"min_p": 0.3}, {0, 1})]
)
def test_a_limit_bounds_what_is_drawn(limit: dict[str, float], support: set[int]) -> None:
    """Each limit alone keeps the most probable tokens, and all of those are drawn."""
    tokens, _ = sample(logits(2000), draws(2000, **limit))
    assert set(tokens.tolist()) == support


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"temperature": 0.5, "top_k": 1}])
def test_a_greedy_row_has_the_raw_logprob(greedy: dict[str, float]) -> None:
    """Greedy sampling takes the best token, and reports it as if the temperature were 1."""
    tokens, logprobs = sample(logits(3), draws(3, **greedy))
    assert tokens.tolist() == [0, 0, 0]
    assert torch.allclose(logits()[0].log_softmax(-1)[0], logprobs[0])


@given(st.integers(0, 2**32), st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.3]), min_size=2, max_size=6))
def test_a_row_is_drawn_the_same_alone_and_among_others(seed: int, temperatures: list[float]) -> None:
    """Other rows with other temperatures and limits change nothing."""
    rows = len(temperatures)
    torch.manual_seed(seed % 1000)
    table = torch.randn(rows, 11)
    mixed = draws(rows)
    mixed.temperature[:] = temperatures
    mixed.top_k[1:] = 4
    mixed.seed[:] += np.uint64(seed)
    tokens, logprobs = sample(table, mixed)
    alone = draws(1)
    alone.temperature[:] = temperatures[0]
    alone.seed[:] = seed
    token, logprob = sample(table[:1], alone)
    assert token[0] == tokens[0]
    assert logprob[0] == pytest.approx(logprobs[0].item(), abs=1e-6)
