"""The garbage collector of a run: calmer inside, as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from rollouts.collector import calm_collector


def test_everything_is_as_before_afterwards() -> None:
    """Also where the run ends with an error."""
    before = gc.get_threshold()

    def fail() -> None:
        with calm_collector():
            assert gc.get_threshold() > before
            assert gc.get_freeze_count() > 0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
