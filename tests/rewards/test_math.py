"""Boxed mathematics, compared by the real math-verify in real processes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts.errors import RewardFailure
from rollouts.rewards import boxed_math
from rollouts.training import Sample

pytest.importorskip("math_verify")


def sample_of(text: str, label: Any) -> Sample:
    return Sample(messages=[{"role": "assistant", "content": text}], label=label)


@pytest.mark.parametrize("label", [None, math.nan, True, ["3", math.nan]], ids=repr)
async def test_a_label_that_is_missing_is_a_failure(label: Any) -> None:
    """Also where the reply has no box: nothing is known about it."""
    for text in ("\\boxed{nan}", "no box"):
        with pytest.raises(RewardFailure, match="label: got"):
            await boxed_math(sample_of(text, label))


async def test_equality_is_mathematical() -> None:
    """Other spellings of a value are correct; other values or intervals, no box and no mathematics are wrong."""
    golden = [
        ("\\boxed{0.5}", "\\frac12", 1.0),
        ("\\boxed{\\sqrt{2}/2}", "\\frac{1}{\\sqrt2}", 1.0),
        ("\\boxed{x=3}", "3", 1.0),
        ("\\boxed{2} or rather \\boxed{4~-~1}", "3", 1.0),
        ("\\boxed{\\text{Evelyn}}", "Evelyn", 1.0),
        ("\\boxed{(1,2]}", "[1,2)", 0.0),
        ("\\boxed{4}", "3", 0.0),
        ("3", "3", 0.0),
        ("\\boxed{}", "3", 0.0),
        ("\\boxed{hello, world}", "3", 0.0),
        ("\\boxed{a^{b_}^}", "3", 0.0),
    ]
    assert [(text, label, await boxed_math(sample_of(text, label))) for text, label, _ in golden] == golden


async def test_every_reference_answer_equals_itself_in_another_spelling(asset: Callable[[str], Path]) -> None:
    """500 real labels; a correct answer is never scored 0."""
    lines = asset("datasets/math500.jsonl").read_text(encoding="utf-8").splitlines()
    labels = [json.loads(line)["label"] for line in lines]
    wrong: list[str] = []

    async def check(label: str) -> None:
        if (
            await boxed_math(sample_of(f"so \\boxed{{{label.replace(chr(92) + 'frac', chr(92) + 'dfrac')}}}.", label))
            != 1.0
        ):
            wrong.append(label)

    async with anyio.create_task_group() as tasks:
        for label in labels:
            tasks.start_soon(check, label)
    assert wrong == []


async def test_what_cannot_be_decided_in_time_is_a_failure() -> None:
    """A power tower is a failure, neither correct nor wrong; the next call works."""
    with pytest.raises(RewardFailure, match=r"9\^\{9\^\{9\^9\}\}.*not decided in 5 s"):
        await boxed_math(sample_of("\\boxed{9^{9^{9^9}}}", "3"))
    assert await boxed_math(sample_of("\\boxed{3}", "3")) == 1.0


async def test_a_label_that_is_no_mathematics_is_a_failure() -> None:
    """Its message names the label."""
    with pytest.raises(RewardFailure, match=r"label: got '.*garbage\{'; expected mathematics"):
        await boxed_math(sample_of("\\boxed{1}", "\\garbage{"))
