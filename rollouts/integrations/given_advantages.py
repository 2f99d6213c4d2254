"""The estimator of advantages for a trainer whose rows have them already, in the place of rewards of tokens.

Invariant: the advantages are those of the row. This module knows no trainer and imports no torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["given_advantages"]


def given_advantages(token_level_rewards: Any, response_mask: Any, **options: Any) -> tuple[Any, Any]:
    """Advantages and returns, tensors ``[b, r]``: the rewards of the tokens, 0 where the mask is.

    Args:
        token_level_rewards: ``Sample.advantages`` of the response, ``[b, r]``.
        response_mask: ``[b, r]``.
        **options: what the trainer passes to its own estimators; not used.
    """
    columns = token_level_rewards * response_mask
    return columns, columns
