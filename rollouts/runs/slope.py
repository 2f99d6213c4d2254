"""Whether logprobs fit the weights that they name, or others: a regression over the same tokens.

In bfloat16, rounding hides the difference of neighbouring weights A and B in each logprob, but not over a run:
``stored - A`` is regressed on ``B - A``. Where A sampled the tokens, the slope is near 0; where B did, near 1; where B
sampled a part of them, near that part. Tokens with a large difference of A and B, or a large residual, get less weight:
the logprobs of rare tokens have heavy tails.

This module knows numbers only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import attrs

from rollouts.dtypes.lazy_numpy import np, npt

__all__ = ["LEAST_SLOPE", "Slope", "slope_of"]

LEAST_SLOPE = 0.25
"""The slope of an honest run in bfloat16 was 0.02 to 0.06 in 20 runs. A and B are rounded alike, so it is above 0."""
_ERRORS = 4.0
"""Standard errors that a slope must be above :data:`LEAST_SLOPE`."""
_ROUNDS = 5

Numbers: TypeAlias = "npt.NDArray[np.floating]"


@attrs.frozen
class Slope:
    """The regression of one version on the weights of another folder."""

    rival: Path
    value: float
    error: float
    """Its standard error."""

    @property
    def fits_rival(self) -> bool:
        """Whether some of the tokens were sampled by the other weights."""
        return self.value - _ERRORS * self.error > LEAST_SLOPE

    def __str__(self) -> str:
        undecided = "" if self.fits_rival or self.value + _ERRORS * self.error < 0.5 else ", undecided"
        return f"slope towards {self.rival}: {self.value:.3f} ± {self.error:.3f}{undecided}"


def slope_of(rival: Path, stored: Numbers, own: Numbers, other: Numbers) -> Slope | None:
    """Regress the logprobs of tokens on two weights; ``None`` where these give equal logprobs.

    Args:
        rival: the folder of the other weights.
        stored: logprobs of the run, ``(n,)``.
        own: those of the weights that the tokens name, ``(n,)``.
        other: those of the other weights, ``(n,)``.
    """
    x, y = np.asarray(other, float) - own, np.asarray(stored, float) - own
    scale = float(np.median(x * x))
    if not scale > 0:
        return None
    leverage = 1 / (scale + x * x)
    weights, value = leverage, 0.0
    for _ in range(_ROUNDS):
        value = float((weights * x * y).sum() / (weights * x * x).sum())
        residuals = np.abs(y - value * x)
        least = 3 * float(np.median(residuals)) + 1e-12
        weights = leverage * np.minimum(1, least / np.maximum(least, residuals))
    error = float(np.sqrt(((weights * x * (y - value * x)) ** 2).sum()) / (weights * x * x).sum())
    return Slope(rival, value, error)
