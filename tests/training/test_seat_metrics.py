"""Metrics by seat."""

from __future__ import annotations

import pytest

from rollouts.dtypes import StopReason
from rollouts.training import Sample
from tests.batches import batch_metrics


def test_a_zero_sum_game_shows_the_rewards_of_each_seat() -> None:
    """The mean over rollouts is always 0; mean, spread and ends of each seat are metrics under its name."""
    rewards = {0: (1.0, 2.0), 1: (-1.0, 1.0)}
    samples = [
        Sample(group_index=group, rollout_id=2 * group + number, seat=seat, reward=sign * reward, tokens=[1],
               stop_reason=StopReason.MAX_TURNS if reward == 2 and sign > 0 else StopReason.TASK_COMPLETED)
        for group, own in rewards.items()
        for number, reward in enumerate(own)
        for seat, sign in (("white", 1), ("black", -1))
    ]  # fmt: skip
    found = batch_metrics(samples)
    assert found["reward/mean"] == 0
    assert found["seat/white/reward/mean"] == pytest.approx(0.75) == -found["seat/black/reward/mean"]
    assert found["seat/white/reward/std"] == pytest.approx(0.75)
    assert found["seat/white/over/max_turns"] == 0.25
    assert found["seat/black/over/task_completed"] == 1
    assert found["seat/white/conversations"] == 1


def test_a_run_without_seats_has_no_such_metrics() -> None:
    """As before."""
    assert not any("seat/" in name for name in batch_metrics([Sample(reward=1.0, tokens=[1])]))
