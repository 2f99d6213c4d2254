"""The drift of stored logprobs against a trainer's own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollouts.errors import ConfigError
from rollouts.training.logprob_drift import logprob_drift


def test_the_metrics_of_a_batch() -> None:
    """Mean distance, largest distance, signed mean, and k3, over all tokens of the batch."""
    found = logprob_drift([np.array([-1.0, -2.0]), np.array([-0.5])], [np.array([-1.5, -2.0]), np.array([-0.25])])
    assert found["logprob_diff"] == pytest.approx(0.25)
    assert found["logprob_diff_max"] == pytest.approx(0.5)
    assert found["logprob_diff_signed"] == pytest.approx(0.25 / 3)
    assert found["logprob_kl"] == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(0.25) - 1.25) / 3)


def test_equal_logprobs_do_not_drift() -> None:
    """All four are 0; a batch without tokens has no drift."""
    assert set(logprob_drift([[-1.0, -3.0]], [[-1.0, -3.0]]).values()) == {0.0}
    assert logprob_drift([[]], [[]]) == {}


def test_columns_of_other_tokens_are_refused() -> None:
    """With the lengths of both."""
    with pytest.raises(ConfigError, match=r"own: got \[2\]; expected columns of \[1\] tokens"):
        logprob_drift([[-1.0]], [[-1.0, -2.0]])
