"""Checksums of the columns of a sample, which a run stores with it."""

from __future__ import annotations

import zlib

from rollouts.dtypes.lazy_numpy import np, npt

__all__ = ["column_digests"]


def column_digests(
    tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], logprobs: npt.NDArray[np.float32] | None
) -> dict[str, int | None]:
    """CRC-32 of each column (little-endian int32, bytes of 0 and 1, little-endian float32)."""
    return {
        "tokens": zlib.crc32(tokens.astype("<i4").tobytes()),
        "loss_mask": zlib.crc32(mask.astype(np.uint8).tobytes()),
        "rollout_log_probs": None if logprobs is None else zlib.crc32(logprobs.astype("<f4").tobytes()),
    }
