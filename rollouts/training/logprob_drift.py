"""The drift of stored logprobs against the trainer's logprobs of the same tokens, as metrics of a batch.

A trainer that computes logprobs before its step has both columns. A signed mean far from 0, or a mean that jumps
between batches, shows other weights, another temperature or other kernels, long before a reward does. This module does
not know a trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError

__all__ = ["logprob_drift"]


def logprob_drift(stored: Sequence[npt.ArrayLike], own: Sequence[npt.ArrayLike]) -> dict[str, float]:
    """Metrics of the trained tokens of a batch.

    Args:
        stored: the logprobs of the samples, a column each, ``(n,)``.
        own: those of the trainer, of the same tokens.

    Returns:
        ``logprob_diff``, the mean distance; ``logprob_diff_max``; ``logprob_diff_signed``, the mean of stored less own;
        ``logprob_kl``, the estimate k3 of the KL divergence of the trainer's policy from the policy that sampled, in
        nats a token. Empty without tokens.

    Raises:
        ConfigError: columns of different lengths.
    """
    lengths = [[np.size(column) for column in columns] for columns in (stored, own)]
    if lengths[0] != lengths[1]:
        raise ConfigError.of("logprob_drift, own", lengths[1], f"columns of {lengths[0]} tokens, as stored")
    if not sum(lengths[0]):
        return {}
    difference = np.concatenate([np.ravel(column) for column in stored]).astype(float)
    difference -= np.concatenate([np.ravel(column) for column in own])
    return {
        "logprob_diff": float(np.abs(difference).mean()),
        "logprob_diff_max": float(np.abs(difference).max()),
        "logprob_diff_signed": float(difference.mean()),
        "logprob_kl": float((np.expm1(-difference) + difference).mean()),
    }
