"""Rewards by rule: golden cases, and labels that cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollouts.errors import RewardFailure
from rollouts.rewards import exact_match, f1_score, multiple_choice, numeric_match
from rollouts.training import Sample

NOT_LABELS = [
    math.nan,
    math.inf,
    np.float32("nan"),
    Decimal("nan"),
    Decimal("snan"),
    True,
    False,
    np.True_,
    b"a",
]
"""Values that equal no answer; pandas has NaN for a label that is missing."""


def sample_of(text: str, label: Any) -> Sample:
    return Sample(messages=[{"role": "assistant", "content": text}], label=label)


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("The answer is the Eiffel Tower.", "Eiffel tower", 1.0),
        ("The answer is Big Ben", ["Eiffel tower", "Big Ben"], 1.0),
        ("Big Ben, London", "Big Ben", 0.0),
        ("+", "-", 0.0),
        ("+", "+", 1.0),
        ("", "x", 0.0),
    ],
)
def test_exact_match(text: str, label: Any, reward: float) -> None:
    """Without case, articles and punctuation; one of several labels is enough; more words are wrong."""
    assert exact_match(sample_of(text, label)) == reward


def test_exact_match_to_the_letter() -> None:
    """``loose=False`` compares the texts as they are."""
    strict = partial(exact_match, loose=False)
    assert strict(sample_of("Answer: Paris", "Paris")) == 1.0
    assert strict(sample_of("Answer: paris", "Paris")) == 0.0


def test_numbers_within_a_tolerance() -> None:
    """Equal as decimals by default; else within the larger of both bounds."""
    assert numeric_match(sample_of("0.30", "0.3")) == 1.0
    assert numeric_match(sample_of("about 3.1", "3.14")) == 0.0
    assert numeric_match(sample_of("about 3.1", "3.14"), absolute=0.05) == 1.0
    assert numeric_match(sample_of("-1,010", 1000), relative=0.01) == 0.0
    assert numeric_match(sample_of("1,010", 1000), relative=0.01) == 1.0
    assert numeric_match(sample_of("no idea", 1)) == 0.0


def test_multiple_choice() -> None:
    """By letter, however the label writes it."""
    assert multiple_choice(sample_of("The answer is (B).", "b)")) == 1.0
    assert multiple_choice(sample_of("The answer is (B).", "A")) == 0.0
    assert multiple_choice(sample_of("A and B", "A")) == 0.0


def test_f1_is_the_best_over_the_labels() -> None:
    """Words in common, as often as they come: "the cat sat" against "cat" has precision 1/2 and recall 1."""
    assert f1_score(sample_of("the cat sat", "cat")) == pytest.approx(2 / 3)
    assert f1_score(sample_of("the cat sat", ["dog", "A cat sat!"])) == 1.0
    assert f1_score(sample_of("cat cat", "cat")) == pytest.approx(2 / 3)
    assert f1_score(sample_of("dog", "cat")) == 0.0


@pytest.mark.parametrize("rule", [exact_match, numeric_match, multiple_choice, f1_score], ids=lambda r: r.__name__)
@pytest.mark.parametrize(
    "label", [None, "", [], ["a", ""], {}, *NOT_LABELS, *([label] for label in NOT_LABELS)], ids=repr
)
def test_a_label_that_nothing_can_equal_is_a_failure(rule: Callable[[Sample], float], label: Any) -> None:
    """Never a reward of 0, which would blame the model for the data."""
    with pytest.raises(RewardFailure, match="label: got"):
        rule(sample_of(f"The answer is {label}", label))


@pytest.mark.parametrize("label", [7, 7.0, Decimal(7), np.int64(7), np.float32(7), "7", ["8", 7]], ids=repr)
def test_a_text_or_a_number_is_a_label(label: Any) -> None:
    """Of any type of number that its data set has, also in a list."""
    assert f1_score(sample_of(f"The answer is {label[1] if isinstance(label, list) else label}", label)) == 1.0
