"""The garbage collector during a run: it skips older objects, and its settings are restored."""

from __future__ import annotations

import gc

import pytest

from rollouts.concurrency.gc_pauses import calm_collector

pytestmark = pytest.mark.usefixtures("thawed")


def _fail_inside(old: list[list[object]]) -> None:
    with calm_collector():
        assert not any(entry is old for entry in gc.get_objects())
        new: list[object] = []
        new.append(new)
        del new
        assert gc.collect() >= 1
        raise OSError("ended")


def test_existing_objects_are_frozen_and_unfrozen() -> None:
    """Cycles of the run are still freed; thresholds are restored, also after an error."""
    old: list[list[object]] = [[] for _ in range(1000)]
    thresholds = gc.get_threshold()
    with pytest.raises(OSError, match="ended"):
        _fail_inside(old)
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


def test_a_process_that_has_frozen_its_objects_is_left_alone() -> None:
    """Its thresholds and frozen objects stay."""
    gc.freeze()
    count, thresholds = gc.get_freeze_count(), gc.get_threshold()
    try:
        with calm_collector():
            assert gc.get_threshold() == thresholds
        assert gc.get_freeze_count() > count / 2, "some objects may be freed since, but they were not unfrozen"
    finally:
        gc.unfreeze()
