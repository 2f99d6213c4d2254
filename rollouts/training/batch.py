"""Samples as tensors, for a trainer that takes them; and what a batch says of each: its advantage and its weight.

Invariant: row ``i`` of everything is ``samples[i]``; padding stands at the right, is never trained and has logprob 0;
packed, no token sees a token of another sample. What is counted by rollout is counted by ``rollout_id``: branches of
one rollout are one reward in their group's mean, and share one weight.

torch is imported when :func:`collate` is called; this module knows nothing of how samples came to be, and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from rollouts.errors import ConfigError
from rollouts.training.types import Sample

if TYPE_CHECKING:
    import torch

__all__ = ["PackedBatch", "RolloutBatch", "collate", "collate_packed", "group_advantages", "loss_weights"]

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before it divides; slime's number."""


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
    _check_all(samples)
    _check_torch()
    import torch

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


@attrs.frozen(eq=False)
class PackedBatch:
    """``B`` samples one behind the other in ``N`` tokens, without padding."""

    tokens: torch.Tensor
    """int64, ``(N,)``."""
    positions: torch.Tensor
    """int64, ``(N,)``; counts from 0 in each sample: where it falls back to 0, another sample begins."""
    boundaries: torch.Tensor
    """int32, ``(B + 1,)``; sample ``i`` is ``boundaries[i]`` to ``boundaries[i + 1]``: ``cu_seqlens``."""
    loss_masks: torch.Tensor
    """bool, ``(N,)``; true where the policy sampled the token."""
    rollout_log_probs: torch.Tensor
    """float32, ``(N,)``; natural-log probability of each sampled token when it was sampled, 0 elsewhere."""
    samples: tuple[Sample, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        trained = int(self.loss_masks.sum())
        return f"<PackedBatch {len(self)} samples in {len(self.tokens)} tokens, {trained} trained>"


def collate_packed(samples: Sequence[Sample], *, device: Any = None) -> PackedBatch:
    """Lay samples one behind the other, without padding.

    A model of transformers takes them as one row, ``tokens[None]`` with ``positions[None]`` and no attention mask; the
    variable-length kernels of flash-attention take ``boundaries``.

    Raises:
        ConfigError: as :func:`collate`.
    """
    _check_all(samples)
    _check_torch()
    import torch

    logprobs = [
        np.zeros(len(sample), np.float32) if sample.logprob_column is None else sample.logprob_column
        for sample in samples
    ]

    def tensor(columns: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.concatenate(columns), dtype=dtype, device=device)

    return PackedBatch(
        tokens=tensor([sample.token_column for sample in samples], torch.int64),
        positions=tensor([np.arange(len(sample)) for sample in samples], torch.int64),
        boundaries=tensor([[0], np.cumsum([len(sample) for sample in samples])], torch.int32),
        loss_masks=tensor([sample.mask_column for sample in samples], torch.bool),
        rollout_log_probs=tensor(logprobs, torch.float32),
        samples=tuple(samples),
    )


def group_advantages(samples: Sequence[Sample]) -> npt.NDArray[np.float32]:
    """Rewards as GRPO compares them, ``(B,)``: minus the mean of the group, over its standard deviation + 1e-6.

    The deviation is the unbiased one, as in slime. A group is what shares a ``group_index``, wherever it stands. Mean
    and deviation are taken over its rollouts: one that forks counts once, with the mean of its branches' rewards. A
    group of one rollout has no spread, and advantage 0.

    Raises:
        ConfigError: a sample without a reward or a group index; the message names it.
    """
    for number, sample in enumerate(samples):
        _check_scored(sample, f"samples[{number}]")
    rewards = np.array([sample.reward for sample in samples], np.float64)
    groups = _members([sample.group_index for sample in samples])
    rollouts = _rollouts(samples)
    advantages = np.zeros(len(samples))
    for rows in groups.values():
        branches = _members([rollouts[row] for row in rows])
        of_rollouts = np.array([rewards[[rows[place] for place in places]].mean() for places in branches.values()])
        if len(set(of_rollouts.tolist())) > 1:  # by value: the deviation of equal numbers may be a rounding error
            advantages[rows] = (rewards[rows] - of_rollouts.mean()) / (of_rollouts.std(ddof=1) + STD_EPSILON)
    return advantages.astype(np.float32)


def loss_weights(samples: Sequence[Sample]) -> npt.NDArray[np.float32]:
    """What each token of a sample weighs in the loss, ``(B,)``: the sum over all trained tokens is a mean of rollouts.

    1 / (trained tokens of its whole rollout x rollouts in ``samples``): the mean over rollouts of the mean over tokens,
    slime's default. A long rollout weighs as much as a short one, and a forked one as much as one that is whole.
    """
    rollouts = _rollouts(samples)
    trained = np.array([np.count_nonzero(sample.mask_column) for sample in samples], np.float64)
    of_rollout = _members(rollouts)
    weights = np.zeros(len(samples))
    for rows in of_rollout.values():
        weights[rows] = 1 / max(trained[rows].sum(), 1) / len(of_rollout)
    return weights.astype(np.float32)


def _members(keys: Sequence[Any]) -> dict[Any, list[int]]:
    """Rows by key, keys in the order of their first row."""
    members: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    return members


def _rollouts(samples: Sequence[Sample]) -> list[tuple[str, int]]:
    """What tells rollouts apart: ``rollout_id``, or the place in the batch where a sample has none."""
    return [
        ("place", number) if sample.rollout_id is None else ("rollout", sample.rollout_id)
        for number, sample in enumerate(samples)
    ]


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ConfigError.of("collate", "no torch", 'torch installed: pip install "rollouts[engine]"') from None


def _check_all(samples: Sequence[Sample]) -> None:
    if not samples:
        raise ConfigError.of("collate(samples)", samples, "at least one sample")
    for number, sample in enumerate(samples):
        _check(sample, f"samples[{number}]")


def _check(sample: Sample, place: str) -> None:
    sample.check()
    if not len(sample):
        raise ConfigError.of(f"{place}.tokens", sample, "at least one token")
    _check_scored(sample, place)
    if sample.logprob_column is None and sample.mask_column.any():
        raise ConfigError.of(f"{place}.rollout_log_probs", None, "a logprob for each trained token")


def _check_scored(sample: Sample, place: str) -> None:
    if sample.reward is None:
        raise ConfigError.of(f"{place}.reward", None, "a number: a batch is made of scored samples")
    if sample.group_index is None:
        raise ConfigError.of(f"{place}.group_index", None, "the number of its group")
