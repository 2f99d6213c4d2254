"""ReTool: rows in the shapes of the data sets, a recorded solution with its reward, and files that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from environments.retool import RetoolEnvironment, load_maths
from rollouts.errors import ConfigError
from rollouts.testing.playing import calling, play
from rollouts.training import Sample
from rollouts.training.rewards import boxed_math

DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve: 1+1", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule"},
    "extra_info": {"index": "9a"},
}
AIME = {"ID": "2024-I-1", "Problem": "Find x.", "Solution": "…", "Answer": 204}
OURS = {"prompt": "Find y.", "label": "\\frac12", "metadata": {"level": 1}}


def test_rows_in_each_shape(tmp_path: Path) -> None:
    """DAPO's, AIME's and ours; a problem that comes again is taken once; ``limit`` counts problems."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (DAPO, DAPO, AIME, OURS)))
    prompts = load_maths(str(path))
    assert [(prompt.messages[0].content, prompt.label) for prompt in prompts] == [
        ("Solve: 1+1", "34"),
        ("Find x.", "204"),
        ("Find y.", "\\frac12"),
    ]
    assert prompts[2].metadata == {"level": 1}
    assert len(load_maths(str(path), limit=2)) == 2


def test_rows_of_parquet(tmp_path: Path) -> None:
    """As the hub has them."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([DAPO, DAPO]), path)
    assert [prompt.label for prompt in load_maths(str(path))] == ["34"]
    path.write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match="not Parquet"):
        load_maths(str(path))


def test_real_rows_load(asset: Callable[[str], Path]) -> None:
    """MATH-500, whole."""
    assert len(load_maths(str(asset("datasets/math500.jsonl")))) == 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one row"),
        ("x", "line 1: not JSON"),
        ("[]", "row 1: got"),
        ('{"problem": "?"}', "row 1: got .*expected prompt and label"),
        ('{"problem": "?", "answer": " "}', "row 1: got"),
        ('{"prompt": [1], "label": "1"}', "row 1: prompt: got"),
    ],
)
def test_rows_that_are_none_are_refused(text: str, words: str, tmp_path: Path) -> None:
    """By their number, before work starts."""
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_maths(str(path))


def test_a_source_that_is_none_is_refused(tmp_path: Path) -> None:
    """With what a source may be."""
    for source in (str(tmp_path / "none.jsonl"), "hub:aime", str(tmp_path)):
        with pytest.raises(ConfigError, match="hub:OWNER/DATASET/PATH"):
            load_maths(source)


async def test_a_recorded_solution() -> None:
    """A program, its output, a boxed answer: the environment runs the program, the reward reads the box."""
    pytest.importorskip("math_verify")
    replies: list[Any] = [calling("python", code="print(sum(range(5)) / 4)"), "So it is \\boxed{\\frac{5}{2}}."]
    played = await play(RetoolEnvironment(), "What is (0+1+2+3+4)/4?", replies)
    assert [message.content for message in played.messages if message.role == "tool"] == ["2.5"]
    assert played.done
    assert await boxed_math(Sample(messages=played.chat, label="2.5")) == 1.0
    assert await boxed_math(Sample(messages=played.chat, label="2")) == 0.0
