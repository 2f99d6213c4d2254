"""Replies for trainers that take a prompt and a reply at a time."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from rollouts.integrations.steps import trained_replies
from tests.trainer_samples import scored_groups


def left_out(records: bool) -> Any:
    """A sample of three turns, whose mask leaves out the first reply and one id of the second."""
    whole = scored_groups(1, 3, tails=False)[2]
    first, second, _ = whole.completions
    mask = whole.mask_column.copy()
    mask[first.start : first.stop] = mask[second.start] = False
    whole.loss_mask = mask
    if not records:
        whole.completions = []
    return whole


def test_adjacent_replies_are_apart() -> None:
    """The records say where one ends; without them a run of the mask is one reply."""
    whole = scored_groups(1, 1, tails=False)[0]
    (one,) = whole.completions
    records = [attrs.evolve(one, stop=one.start + 1, finish_reason="length"), attrs.evolve(one, start=one.start + 1)]
    middle = one.start + 1
    whole.completions = records
    assert trained_replies(whole) == [(one.start, middle, True), (middle, one.stop, False)]
    whole.completions = []
    assert trained_replies(whole) == [(one.start, one.stop, False)]


@pytest.mark.parametrize("records", [True, False])
def test_only_what_the_mask_trains_is_a_reply(records: bool) -> None:
    """User code may leave out a reply, or its first ids; it is context of the next."""
    sample = left_out(records)
    trained = [number for start, stop, _ in trained_replies(sample) for number in range(start, stop)]
    assert trained == sample.mask_column.nonzero()[0].tolist()


@pytest.mark.trainer
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("records", [True, False])
def test_a_door_trains_only_what_the_mask_does(records: bool) -> None:
    """Steps of rLLM, and transitions of tinker's cookbook; before, both trained what their user had left out."""
    sample = left_out(records)
    expected = sample.token_column[sample.mask_column].tolist()
    try:
        import rllm.types  # noqa: F401 - whether it is installed
    except ImportError:
        pytest.importorskip("tinker_cookbook.rl.types")
        from rollouts.integrations.tinker import to_trajectory_group

        (trajectory,) = to_trajectory_group([sample]).trajectories_G
        assert [token for one in trajectory.transitions for token in one.ac.tokens] == expected
    else:
        from rollouts.integrations.rllm import to_episodes

        (trajectory,) = to_episodes([sample])[0].trajectories
        assert [token for step in trajectory.steps for token in step.response_ids] == expected
