"""The regression that finds tokens of neighbouring weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollouts.runs.logprobs import VersionReport
from rollouts.runs.slope import slope_of

RIVAL = Path("rival")


def logprobs(
    share: float, noise: float, tokens: int = 3000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stored logprobs, of which a share is of the second weights, and those of both weights; with heavy tails."""
    rng = np.random.default_rng(seed)
    own = -rng.exponential(2.0, tokens)
    other = own + 0.04 * rng.standard_t(3, tokens)
    sampled = np.where(rng.random(tokens) < share, other, own)
    return sampled + noise * rng.standard_t(2, tokens), own, other


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_run_fits_its_weights(seed: int) -> None:
    """20 of 20, with rounding as large as the difference of the weights."""
    slope = slope_of(RIVAL, *logprobs(0.0, 0.04, seed=seed))
    assert slope is not None
    assert not slope.fits_rival
    assert abs(slope.value) < 0.15


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_tokens_of_other_weights_are_found(share: float) -> None:
    """The slope is near the share of the tokens that they sampled."""
    slope = slope_of(RIVAL, *logprobs(share, 0.04))
    assert slope is not None
    assert slope.fits_rival
    assert slope.value == pytest.approx(share, abs=0.15)


def test_rounding_that_hides_the_difference_is_undecided() -> None:
    """No verdict, and the report says so."""
    slope = slope_of(RIVAL, *logprobs(1.0, 4.0))
    assert slope is not None
    assert not slope.fits_rival
    assert str(slope).endswith(", undecided")


def test_equal_weights_have_no_slope() -> None:
    """Another folder with the same weights says nothing."""
    stored, own, _ = logprobs(0.0, 0.01)
    assert slope_of(RIVAL, stored, own, own) is None


def test_a_difference_that_is_no_number_stays_the_largest() -> None:
    """The violation names its token, also if later tokens differ."""
    report = VersionReport("v", RIVAL)
    stored = [np.array([-1.0, -2.0]), np.array([-1.0, np.nan]), np.array([-1.0, -9.0])]
    found = [report.add(one, np.array([-1.0, -2.5]), 1e-3) for one in stored]
    assert [is_new for _, _, is_new in found] == [True, True, False]
    assert report.beyond == 3
    assert np.isnan(report.largest)
