"""Countdown: solutions and their rewards, real and generated rows, and invalid rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rollouts.errors import ConfigError, RewardFailure
from rollouts.recipes.environments.countdown import countdown_prompts, countdown_reward, load_countdown
from rollouts.training import Sample

TASK: dict[str, Any] = {"nums": [3, 5, 2], "target": 4}


def reply(text: str, **metadata: Any) -> Sample:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return Sample(messages=messages, metadata={**TASK, **metadata})


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("I try 3 + 5. <answer> (3 + 5) / 2 </answer>", 1.0),
        ("<answer>9</answer> no: <answer>(3+5)/2 = 4</answer>", 1.0),
        ("<answer>(5 + 3) ÷ 2</answer>", 1.0),
        ("<answer>3 + 5 - 2</answer>", 0.0),
        ("<answer>2 + 2</answer>", 0.0),
        ("<answer>4</answer>", 0.0),
        ("<answer>(3+5)/2*1</answer>", 0.0),
        ("<answer>35 / 2</answer>", 0.0),
        ("<answer>3 ** 5 / 2</answer>", 0.0),
        ("<answer>3 / (5 - 5) + 2</answer>", 0.0),
        ("<answer>__import__('os').getpid()</answer>", 0.0),
        ("<answer>True + 3</answer>", 0.0),
        (f"<answer>{'(' * 5000}</answer>", 0.0),
        ("<think><answer>(3+5)/2</answer></think> I give up", 0.0),
        ("(3 + 5) / 2", 0.0),
        ("", 0.0),
    ],
)
def test_golden_rewards(text: str, reward: float) -> None:
    """A solution uses each number once and plain arithmetic, and has the exact value."""
    assert countdown_reward(reply(text)) == reward


def test_a_wrong_equation_may_earn_the_format_reward() -> None:
    """Text that is not an equation earns nothing."""
    assert countdown_reward(reply("<answer>3 + 5 + 2</answer>"), format_reward=0.1) == 0.1
    assert countdown_reward(reply("<answer>many</answer>"), format_reward=0.1) == 0.0


@pytest.mark.parametrize("metadata", [{"nums": None}, {"nums": []}, {"nums": ["3"]}, {"target": "4"}], ids=repr)
def test_an_invalid_task_is_a_failure(metadata: dict[str, Any]) -> None:
    """It is a failure of the reward, not of the model."""
    with pytest.raises(RewardFailure, match=f"metadata\\['{next(iter(metadata))}'\\]: got"):
        countdown_reward(reply("<answer>1</answer>", **metadata))


def test_a_row_without_numbers_is_refused(tmp_path: Path) -> None:
    """The error names the row."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "metadata": {"nums": [1], "target": 1}}\n{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"row 2: metadata\['nums'\]: got None"):
        load_countdown(path)


def test_the_solution_of_every_row_is_right(asset: Callable[[str], Path]) -> None:
    """1,000 real rows and 200 generated ones, which are the same for the same seed."""
    made_up = list(islice(countdown_prompts(7, numbers=4), 200))
    assert made_up == list(islice(countdown_prompts(7, numbers=4), 200))
    for prompt in [*load_countdown(asset("datasets/countdown.jsonl")), *made_up]:
        sample = reply(f"<answer>{prompt.metadata['one_solution']}</answer>", **prompt.metadata)
        assert countdown_reward(sample) == 1.0
