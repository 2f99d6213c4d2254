"""Tensors, GRPO advantages and loss weights of a batch of samples.

Invariant: row ``i`` of every tensor is ``samples[i]``. Padding is on the right, is never trained and has logprob 0. In
a packed batch, positions and boundaries keep samples apart. Branches with the same ``rollout_id`` count as one rollout:
they are one reward in the mean of their group, and share one loss weight.

torch is imported when :func:`collate` is called. This module does not know how samples are generated, nor the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rollouts.base.extras import install_command
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError
from rollouts.training.branches import rollout_keys
from rollouts.training.comparisons import Comparison, by_key, comparison_keys, conversation_keys
from rollouts.training.rows import check_fields, check_has_ids, reward_of_branches
from rollouts.training.types import Sample, Status

if TYPE_CHECKING:
    import torch

__all__ = [
    "PackedBatch",
    "RolloutBatch",
    "check_ended",
    "collate",
    "collate_packed",
    "group_advantages",
    "loss_weights",
]

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before division; slime's value."""


@attrs.frozen(eq=False)
class RolloutBatch:
    """``B`` samples, padded to ``T`` tokens."""

    tokens: torch.Tensor
    """int64, ``(B, T)``; ``pad_token_id`` on padding."""
    loss_masks: torch.Tensor
    """bool, ``(B, T)``; true where the policy sampled the token."""
    attention_mask: torch.Tensor
    """bool, ``(B, T)``; true on tokens, false on padding."""
    rollout_log_probs: torch.Tensor
    """float32, ``(B, T)``; natural-log probability of each sampled token when it was sampled, 0 elsewhere."""
    rewards: torch.Tensor
    """float32, ``(B,)``."""
    lengths: torch.Tensor
    """int64, ``(B,)``; number of tokens of each sample, prompt and response."""
    response_lengths: torch.Tensor
    """int64, ``(B,)``; number of tokens from the first sampled one to the end."""
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
    """Pad samples to the longest and stack them.

    Args:
        samples: at least one; each has a reward and a group index, and logprobs if a token is trained.
        device: device of the tensors; ``None`` for the CPU.
        pad_token_id: value of ``tokens`` on padding.

    Raises:
        ConfigError: no samples, torch is not installed, or a sample lacks a field, which the message names.
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
    """``B`` samples concatenated to ``N`` tokens, without padding."""

    tokens: torch.Tensor
    """int64, ``(N,)``."""
    positions: torch.Tensor
    """int64, ``(N,)``; position of each token in its sample, from 0."""
    boundaries: torch.Tensor
    """int32, ``(B + 1,)``; sample ``i`` is ``tokens[boundaries[i] : boundaries[i + 1]]``: ``cu_seqlens``."""
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
    """Concatenate samples without padding.

    A transformers model takes them as one row, ``tokens[None]`` with ``positions[None]`` and no attention mask; the
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


def group_advantages(samples: Sequence[Sample], *, by: Comparison | None = None) -> npt.NDArray[np.float32]:
    """Compute GRPO advantages, float32 ``(B,)``: reward minus the group's mean, over its standard deviation + 1e-6.

    The standard deviation is unbiased, as in slime. Samples with the same ``group_index`` form a group, in any order.
    Mean and deviation are taken over rollouts: a rollout that forks counts once, with the reward of its branches.
    A group without spread has advantage 0.

    Where a rollout has several agents, they are taken over the conversations of one seat, so that a reward is never
    compared with that of another seat.

    Args:
        samples: scored samples of whole groups.
        by: which rewards are compared, a :data:`~rollouts.training.comparisons.Comparison`; by default as the metadata
            of each sample says.

    Raises:
        ConfigError: a sample without a reward or a group index, or samples of one conversation with unlike rewards,
            which the deviation of the conversations does not describe; the message names the sample.
    """
    for number, sample in enumerate(samples):
        _check_scored(sample, f"samples[{number}]")
    rewards = np.array([sample.reward for sample in samples], np.float64)
    groups = by_key(comparison_keys(samples, by), range(len(samples)))
    conversations = conversation_keys(samples)
    advantages = np.zeros(len(samples))
    for rows in groups.values():
        branches = by_key([conversations[row] for row in rows], [samples[row] for row in rows])
        each = np.array([*map(reward_of_branches, branches.values())])
        if len(set(each.tolist())) > 1:  # the deviation of equal numbers may be a rounding error instead of 0
            advantages[rows] = (rewards[rows] - each.mean()) / (each.std(ddof=1) + STD_EPSILON)
    return advantages.astype(np.float32)


def loss_weights(samples: Sequence[Sample]) -> npt.NDArray[np.float32]:
    """Compute the loss weight of each trained token of a sample, float32 ``(B,)``.

    1 / (trained tokens of its rollout x rollouts in ``samples``), so that the weighted sum over all trained tokens is
    the mean over rollouts of the mean over tokens, slime's default. Each rollout has the same total weight, whatever
    its length and its number of branches, times the ``loss_multiplier`` of each sample.
    """
    rollouts = rollout_keys(samples)
    trained = np.array([np.count_nonzero(sample.mask_column) for sample in samples], np.float64)
    members = by_key(rollouts, range(len(samples)))
    weights = np.zeros(len(samples))
    for rows in members.values():
        weights[rows] = 1 / max(trained[rows].sum(), 1) / len(members)
    weights *= [sample.loss_multiplier for sample in samples]
    return weights.astype(np.float32)


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ConfigError.of("collate", "no torch", f"torch installed: {install_command('engine')}") from None


def _check_all(samples: Sequence[Sample]) -> None:
    if not samples:
        raise ConfigError.of("collate(samples)", samples, "at least one sample")
    for number, sample in enumerate(samples):
        _check(sample, f"samples[{number}]")


def _check(sample: Sample, place: str) -> None:
    sample.check()
    check_fields(sample, "a batch of tensors", "images")
    if not len(sample):
        raise ConfigError.of(f"{place}.tokens", sample, "at least one token")
    _check_scored(sample, place)
    if sample.logprob_column is None and sample.mask_column.any():
        raise ConfigError.of(f"{place}.rollout_log_probs", None, "a logprob for each trained token")


def check_ended(sample: Sample) -> None:
    """Check that a rollout has a verdict: the sum of the steps before a failure is none.

    Raises:
        ConfigError: it failed, or was aborted.
    """
    if sample.status in (Status.FAILED, Status.ABORTED):
        raise ConfigError.of(f"{sample!r}.status", sample.status.value, "a rollout that ended; leave this one out")


def _check_scored(sample: Sample, place: str) -> None:
    check_has_ids(sample)
    check_ended(sample)
    if sample.reward is None:
        raise ConfigError.of(f"{place}.reward", None, "a number: a batch is made of scored samples")
    if sample.group_index is None:
        raise ConfigError.of(f"{place}.group_index", None, "the number of its group")
