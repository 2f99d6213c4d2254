"""Samples as tensors, for a trainer that takes them.

Invariant: row ``i`` of every tensor is ``samples[i]``; padding stands at the right, is never trained and has logprob 0.
torch is imported when :func:`collate` is called; this module knows nothing of how samples came to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rollouts.errors import ConfigError
from rollouts.training.types import Sample

if TYPE_CHECKING:
    import torch

__all__ = ["RolloutBatch", "collate"]


@attrs.frozen(eq=False)
class RolloutBatch:
    """``B`` samples, the longest of ``T`` tokens."""

    tokens: torch.Tensor
    """int64, ``(B, T)``; ``pad_token_id`` after the end."""
    loss_masks: torch.Tensor
    """bool, ``(B, T)``; true where the policy sampled the token."""
    attention_mask: torch.Tensor
    """bool, ``(B, T)``; true where there is a token, false on padding."""
    rollout_log_probs: torch.Tensor
    """float32, ``(B, T)``; natural-log probability of each sampled token when it was sampled, 0 elsewhere."""
    rewards: torch.Tensor
    """float32, ``(B,)``."""
    lengths: torch.Tensor
    """int64, ``(B,)``; tokens of each sample, prompt and response."""
    response_lengths: torch.Tensor
    """int64, ``(B,)``; tokens from the first sampled one on."""
    group_indices: torch.Tensor
    """int64, ``(B,)``; equal for rollouts of one prompt."""
    samples: tuple[Sample, ...]
    metadata: tuple[dict[str, Any], ...]
    """The metadata of each sample."""

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        rows, width = self.tokens.shape
        return f"<RolloutBatch {rows} samples of up to {width} tokens, {int(self.loss_masks.sum())} trained>"


def collate(samples: Sequence[Sample], *, device: Any = None, pad_token_id: int = 0) -> RolloutBatch:
    """Pad samples to one width and stack them.

    Args:
        samples: at least one, each with a reward, a group index and, where a token is trained, logprobs.
        device: where the tensors go; ``None`` for the CPU.
        pad_token_id: fills ``tokens`` after the end of a sample.

    Raises:
        ConfigError: no samples, torch is not installed, or a sample lacks something; the message names it.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError.of("collate", "no torch", 'torch installed: pip install "rollouts[engine]"') from None
    if not samples:
        raise ConfigError.of("collate(samples)", samples, "at least one sample")
    for number, sample in enumerate(samples):
        _check(sample, f"samples[{number}]")
    lengths = np.array([len(sample) for sample in samples])
    shape = (len(samples), int(lengths.max()))
    tokens = np.full(shape, pad_token_id, np.int64)
    mask = np.zeros(shape, np.bool_)
    logprobs = np.zeros(shape, np.float32)
    for row, sample in enumerate(samples):
        tokens[row, : lengths[row]] = sample.token_column
        mask[row, : lengths[row]] = sample.mask_column
        if sample.logprob_column is not None:
            logprobs[row, : lengths[row]] = sample.logprob_column

    def tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    return RolloutBatch(
        tokens=tensor(tokens, torch.int64),
        loss_masks=tensor(mask, torch.bool),
        attention_mask=tensor(np.arange(shape[1]) < lengths[:, None], torch.bool),
        rollout_log_probs=tensor(logprobs, torch.float32),
        rewards=tensor([sample.reward for sample in samples], torch.float32),
        lengths=tensor(lengths, torch.int64),
        response_lengths=tensor([sample.response_length for sample in samples], torch.int64),
        group_indices=tensor([sample.group_index for sample in samples], torch.int64),
        samples=tuple(samples),
        metadata=tuple(sample.metadata for sample in samples),
    )


def _check(sample: Sample, place: str) -> None:
    sample.check()
    if not len(sample):
        raise ConfigError.of(f"{place}.tokens", sample, "at least one token")
    if sample.reward is None:
        raise ConfigError.of(f"{place}.reward", None, "a number: a batch is made of scored samples")
    if sample.group_index is None:
        raise ConfigError.of(f"{place}.group_index", None, "the number of its group")
    if sample.logprob_column is None and sample.mask_column.any():
        raise ConfigError.of(f"{place}.rollout_log_probs", None, "a logprob for each trained token")
