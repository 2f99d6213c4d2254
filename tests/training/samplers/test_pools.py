"""Pools by the mean reward of the last group: hard and easy prompts are drawn in a share of the passes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.training import DataBuffer
from rollouts.training.samplers import PoolSampler

MEANS = {"hard": 0.0, "hard, too": 0.25, "normal": 0.5, "easy": 0.75, "easy, too": 1.0}


def test_a_pool_has_its_share_of_the_passes() -> None:
    """Hard and easy prompts come in one of five passes, the others in each; the metrics count the pools."""
    sampler = PoolSampler()
    buffer = DataBuffer(list(MEANS), seed=1, sampler=sampler)
    drawn: Counter[str] = Counter()
    while sampler.pass_of(0) < 101:
        (prompt,) = buffer.get_prompts(1)
        drawn[str(prompt.prompt)] += 1
        buffer.observe(prompt, [MEANS[str(prompt.prompt)]] * 4)
    assert drawn["normal"] in (101, 102)
    assert all(abs(drawn[name] - 21) <= 1 for name in MEANS if name != "normal")
    assert {name: sampler.metrics()[name] for name in sampler.shares} == {"hard": 2, "normal": 1, "easy": 2}


def test_the_last_group_decides() -> None:
    """A prompt leaves its pool with the next group, and a group without rewards changes nothing."""
    sampler = PoolSampler()
    DataBuffer(["a"], sampler=sampler)
    for rewards, share in (([0.0] * 4, 0.2), ([None] * 4, 0.2), ([1.0, 0.0, 1.0, 0.0], 1.0), ([1.0] * 4, 0.2)):
        sampler.observe(0, rewards)
        assert sampler.share(0, 1) == share


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"hard_share": 0}, r"PoolSampler\.hard_share: got 0; expected a number above 0"),
        ({"easy_share": 2}, r"PoolSampler\.easy_share: got 2"),
        ({"hard": 0.8}, r"PoolSampler\.hard, PoolSampler\.easy: got \(0\.8, 0\.75\)"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers: dict[str, Any], words: str) -> None:
    """By name, with what is expected."""
    with pytest.raises(ConfigError, match=words):
        PoolSampler(**numbers)
