"""Filters for slime's flags, and the order of waiting groups."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.integrations.slime import filters
from rollouts.integrations.slime.records import records

ARGS = Namespace(reward_key=None, n_samples_per_prompt=2)


def sample(index: int, reward: Any = None, **fields: Any) -> Any:
    return records().sample(index=index, reward=reward, response=f"r{index}", **fields)


def test_ours_answer_as_slimes() -> None:
    """Keep, and why not."""
    kept = filters.check_reward_nonzero_std(ARGS, [sample(0, 1.0), sample(1, 0.0)])
    dropped = filters.check_reward_nonzero_std(ARGS, [sample(0, 1.0), sample(1, 1.0)], rollout_id=3)
    assert isinstance(kept, records().filter_output)
    assert (kept.keep, kept.reason) == (True, None)
    assert (dropped.keep, dropped.reason) == (False, "check_reward_nonzero_std")


def test_groups_that_fan_out_are_filtered() -> None:
    """slime's own filter raises on them."""
    group = [[sample(0, 1.0), sample(0, 1.0)], [sample(1, 0.0)]]
    assert filters.check_reward_nonzero_std(ARGS, group).keep
    assert filters.check_response_diversity(ARGS, group).keep


def test_the_reward_key_holds() -> None:
    """A filter reads the entry of a dict reward that is trained on."""
    args = Namespace(reward_key="score", n_samples_per_prompt=2)
    same = [sample(i, {"score": 1.0, "other": float(i)}) for i in range(2)]
    assert not filters.check_reward_nonzero_std(args, same).keep


@pytest.mark.parametrize("check", [filters.check_reward_nonzero_std, filters.check_quality_and_diversity])
def test_groups_of_one_are_refused(check: Any) -> None:
    """Every group would be dropped, for ever."""
    with pytest.raises(ConfigError, match="at least 2"):
        check(Namespace(n_samples_per_prompt=1), [sample(0, 1.0)])


def test_others_read_what_they_need() -> None:
    """Status and length come through."""
    status = records().sample.Status
    done = [sample(0, 0.0, status=status.COMPLETED, response_length=3)]
    cut = [sample(0, 0.0, status=status.TRUNCATED, response_length=0)]
    assert filters.check_any_success(ARGS, done).keep
    assert not filters.check_any_success(ARGS, cut).keep
    assert filters.check_reasonable_length(ARGS, done).keep
    assert not filters.check_reasonable_length(ARGS, cut).keep
    assert not filters.check_min_reward(ARGS, done).keep


def group(number: int, *, begun: int | None = None, length: int = 0, reward: Any = None, difficulty: float = 0) -> Any:
    metadata = {"difficulty": difficulty} | ({} if begun is None else {"start_rollout_id": begun})
    return [sample(2 * number + i, reward, response_length=length, metadata=metadata) for i in range(2)]


@pytest.mark.parametrize(
    ("pop", "expected"),
    [
        (filters.pop_first, [0, 1]),
        (filters.pop_stalest, [2, 1]),
        (filters.pop_most_advanced, [3, 1]),
        (filters.pop_hardest, [3, 2]),
    ],
)
def test_what_is_taken_leaves_the_buffer(pop: Any, expected: list[int]) -> None:
    """By age, by staleness, by progress, by difficulty; the rest keeps its order."""
    buffer = [
        group(0, reward=1.0),
        group(1, begun=5, length=4, difficulty=0.1),
        group(2, begun=3, length=2, difficulty=0.8),
        group(3, length=9, reward=0.0),
    ]
    numbers = {id(entry): number for number, entry in enumerate(buffer)}
    rest = [entry for number, entry in enumerate(buffer) if number not in expected]
    assert [numbers[id(entry)] for entry in pop(ARGS, None, buffer, 2)] == expected
    assert [id(entry) for entry in buffer] == [id(entry) for entry in rest]
    assert len(pop(ARGS, None, buffer, 9)) == 2
    assert buffer == []
