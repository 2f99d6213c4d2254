"""Sampling: one vectorised draw for all rows of a step.

Invariant: the logprob of a token is ``log_softmax(logits / temperature)`` over the whole vocabulary, before top-k,
top-p and min-p, from the same tensor as the draw; for greedy rows the temperature is 1. A draw depends only on the
row's logits, seed and position, never on other rows.

This module does not know requests or slots.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Draws", "sample", "tempered", "uniforms"]


@attrs.define
class Draws:
    """Sampling parameters of each row; arrays of shape ``(rows,)``."""

    temperature: npt.NDArray[np.float32]
    """0 is greedy."""
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    """A value below 1 sets no limit."""
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    """Number of tokens already sampled for the row."""


def uniforms(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Random numbers in the open interval (0, 1), a pure function of seed and position (counter mode, no state)."""
    with np.errstate(over="ignore"):
        bits = _mixed(_mixed(seed) + position.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the output."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def tempered(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The logprobs of all ids, ``(rows, vocabulary)``: after the temperature, before truncation."""
    scale = np.where(_greedy(draws), np.float32(1), draws.temperature)
    if (scale != 1).any():
        logits = logits / torch.from_numpy(scale).to(logits.device)[:, None]
    return logits.log_softmax(-1)


def _greedy(draws: Draws) -> npt.NDArray[np.bool_]:
    greedy: npt.NDArray[np.bool_] = (draws.temperature == 0) | (draws.top_k == 1)
    return greedy


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row of ``logits`` (rows, vocabulary); return tokens and logprobs, both (rows,)."""
    device = logits.device
    greedy = _greedy(draws)
    logprobs = tempered(logits, draws)
    if greedy.all():
        tokens = logprobs.argmax(-1)
    else:
        weights = logprobs.exp()
        limited = ~greedy & ((draws.top_p < 1) | (draws.top_k > 0) | (draws.min_p > 0))
        if limited.any():
            rows = torch.from_numpy(np.flatnonzero(limited)).to(device)
            weights[rows] = _truncated(weights[rows], draws, limited)
        # The first token whose cumulative weight reaches the draw. The draw is above 0, so the token's weight is too.
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        drawn = torch.from_numpy(uniforms(draws.seed, draws.position)).to(device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, drawn)[:, 0].clamp_(max=logits.shape[1] - 1)  # NaN weights: any index
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(device), logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _truncated(weights: torch.Tensor, draws: Draws, which: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Set probabilities outside top-k, top-p and min-p to zero; the most probable token is always kept."""
    device = weights.device
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=device)
    top_k = torch.from_numpy(draws.top_k[which]).to(device)[:, None]
    top_p = torch.from_numpy(draws.top_p[which]).to(device)[:, None]
    min_p = torch.from_numpy(draws.min_p[which]).to(device)[:, None]
    before = ordered.cumsum(-1) - ordered
    keep = (top_k < 1) | (rank < top_k)
    keep &= (top_p >= 1) | (before < top_p)
    keep &= ordered >= min_p * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, order, ordered * keep)
