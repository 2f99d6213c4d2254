"""Levels of generated tasks: the level rises and falls with the rewards, and levels below are reviewed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.training import DataBuffer
from rollouts.training.samplers import LevelSampler


def rows(count: int = 30) -> list[Prompt]:
    return [Prompt(f"q{number}", metadata={"level": number % 3}) for number in range(count)]


def played(sampler: LevelSampler, skill: int, draws: int) -> list[int]:
    """The levels of the draws of a policy that solves the levels below its skill."""
    buffer = DataBuffer(rows(), seed=1, sampler=sampler)
    levels = []
    for _ in range(draws):
        (prompt,) = buffer.get_prompts(1)
        level = prompt.metadata["level"]
        levels.append(level)
        buffer.observe(prompt, [float(level < skill)] * 4)
    return levels


def test_the_level_rises_until_the_policy_fails() -> None:
    """It stays where rewards are neither high nor low; and falls from a level that nothing solves."""
    sampler = LevelSampler(window=4, review=0)
    levels = played(sampler, skill=2, draws=200)
    assert levels[:4] == [0] * 4
    assert levels[4:8] == [1] * 4
    assert set(levels[8:]) == {1, 2}, "it falls back from 2, and rises again"
    assert played(LevelSampler(window=4, review=0), skill=0, draws=50) == [0] * 50


def test_each_fifth_draw_reviews_a_level_below() -> None:
    """In turn, so that solved levels are not forgotten; the metric names the level."""
    sampler = LevelSampler(window=4, review=5, fall_at=-1.0)
    levels = played(sampler, skill=2, draws=200)
    assert Counter(levels[100:]) == {2: 80, 0: 10, 1: 10}
    assert sampler.metrics() == {"level": 2}


def test_a_prompt_is_not_drawn_again_before_the_others_of_its_level() -> None:
    """A level with ten prompts gives each of them once in ten draws."""
    buffer = DataBuffer(rows(), seed=4, sampler=LevelSampler(review=0))
    for _ in range(3):
        assert len({str(prompt.prompt) for prompt in buffer.get_prompts(10)}) == 10


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"window": 0}, r"LevelSampler\.window, LevelSampler\.review: got \(0, 5\)"),
        ({"fall_at": 0.9}, r"LevelSampler\.fall_at, LevelSampler\.rise_at: got \(0\.9, 0\.75\)"),
        ({"key": "depth"}, r"prompts\[0\]\.metadata\['depth'\]: got None; expected a number, its level"),
    ],
)
def test_numbers_and_data_without_levels_are_refused(numbers: dict[str, Any], words: str) -> None:
    """By name, with what is expected."""
    with pytest.raises(ConfigError, match=words):
        DataBuffer(rows(), sampler=LevelSampler(**numbers))
