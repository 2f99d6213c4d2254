"""Which samples are one conversation, and which rewards are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollouts.errors import ConfigError
from rollouts.training import Sample
from rollouts.training.batch import group_advantages
from rollouts.training.branches import by_rollout
from rollouts.training.comparisons import by_comparison, by_conversation
from rollouts.training.filters import check_reward_nonzero_std


def row(rollout: int, seat: str, reward: float, conversation: int = 0, **fields: Any) -> Sample:
    return Sample(group_index=0, rollout_id=rollout, seat=seat, conversation=conversation, reward=reward, **fields)


def proposed() -> list[Sample]:
    """Two rollouts: in each a proposer, and three solvers of its problem."""
    solved = [(0.0, 1.0, 1.0), (0.0, 0.0, 1.0)]
    return [
        sample
        for rollout, rewards in enumerate(solved)
        for sample in [
            row(rollout, "proposer", sum(rewards) / 3),
            *(row(rollout, "solver", reward, number) for number, reward in enumerate(rewards)),
        ]
    ]


def numbers(groups: Sequence[Sequence[Sample]]) -> list[int]:
    return [len(group) for group in groups]


def test_a_rollout_of_seats_is_one_rollout_and_several_conversations() -> None:
    """Branches of a conversation stay together; without seats a rollout is one conversation."""
    samples = proposed()
    assert numbers(by_rollout(samples)) == [4, 4]
    assert numbers(by_conversation(samples)) == [1] * 8
    forked = [row(0, "solver", 1.0, 0), row(0, "solver", 1.0, 0), row(0, "solver", 0.0, 1)]
    assert numbers(by_conversation(forked)) == [2, 1]
    assert numbers(by_conversation([row(0, "", 1.0), row(0, "", 1.0), row(1, "", 1.0)])) == [2, 1]


def test_rewards_of_unlike_seats_are_never_compared_unless_named() -> None:
    """By seat, by seat within the episode, or all: a comparison is an argument, and a mistyped one is refused."""
    samples = proposed()
    assert numbers(by_comparison(samples)) == [2, 6]
    assert numbers(by_comparison(samples, "episode")) == [1, 3, 1, 3]
    assert numbers(by_comparison(samples, {"solver": "episode"})) == [2, 3, 3]
    assert numbers(by_comparison(samples, "group")) == [8]
    with pytest.raises(ConfigError, match="by: got 'rollout'; expected one of"):
        by_comparison(samples, "rollout")


@pytest.mark.parametrize("by", ["seat", "episode", "group", {"solver": "episode"}])
def test_advantages_of_a_comparison_add_up_to_zero(by: Any) -> None:
    """And none exceeds what as many rewards allow: no deviation of other rewards divides them."""
    samples = proposed()
    values = dict(zip(map(id, samples), group_advantages(samples, by=by).tolist(), strict=True))
    for members in by_comparison(samples, by):
        own = [values[id(sample)] for sample in members]
        assert sum(own) == pytest.approx(0, abs=1e-5)
        assert max(map(abs, own)) <= (len(own) - 1) / np.sqrt(len(own)) + 1e-6


def test_a_conversation_that_forks_counts_once() -> None:
    """With the reward of its branches; branches with unlike rewards are refused."""
    samples = [row(0, "solver", 1.0, 0), row(0, "solver", 1.0, 0), row(0, "solver", 0.0, 1)]
    assert group_advantages(samples).tolist() == pytest.approx([0.7071, 0.7071, -0.7071], abs=1e-3)
    samples[0].reward = 0.5
    with pytest.raises(ConfigError, match="unlike rewards"):
        group_advantages(samples)


def test_the_filter_looks_at_the_same_rewards_as_the_advantages() -> None:
    """A seat that always wins has no spread, though the rewards of its group differ; before, the group was kept."""
    samples = [row(rollout, seat, reward) for rollout in range(4) for seat, reward in (("a", 1.0), ("b", -1.0))]
    assert not check_reward_nonzero_std(samples)
    assert not group_advantages(samples).any()
    samples[0].reward = 0.5
    assert check_reward_nonzero_std(samples)
    assert not check_reward_nonzero_std(samples, by="episode")
