"""The final answer of a reply."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest

from rollouts.rewards.answers import boxed, decimal, final_answer, final_choice, final_number, final_reply
from rollouts.training import Sample


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed {3}", "3"),
        ("\\boxed{4} then \\boxed{5", "4"),
        ("\\boxed{", None),
        ("\\boxed{1} \\boxed{2 \\boxed{3} {4}", "3"),
        ("\\boxed{a \\boxed{b} c}", "b"),
        ("none", None),
    ],
)
def test_the_last_closed_box(text: str, expected: str | None) -> None:
    """Braces are balanced; a box that was cut off is none."""
    assert boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so <answer> (1 + 2) </answer> \\boxed{9}", "(1 + 2)"),
        ("so \\boxed{9}. The answer is 8", "9"),
        ("The answer is Paris.\nReally.", "Paris."),
        ("Answer: B", "B"),
        ("  Paris ", "Paris"),
    ],
)
def test_the_final_answer(text: str, expected: str) -> None:
    """Tags before boxes before words; without any mark the whole text."""
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is (C).", "C"),
        ("\\boxed{\\text{D}}", "D"),
        ("**B**", "B"),
        ("A", "A"),
        ("It must be B, since B fits.", "B"),
        ("A or B, I cannot tell", None),
        ("The answer is Berlin", None),
        ("Answer: none", None),
        ("Because C's value is high", None),
    ],
)
def test_the_choice(text: str, expected: str | None) -> None:
    """The marked letter, or the only one that stands alone; a word that begins with a letter is not a choice."""
    assert final_choice(text, "ABCD") == expected


def test_the_final_reply_is_the_last_of_the_assistant_without_its_thoughts() -> None:
    """Later tool results are ignored; without messages, the response is used."""
    messages = [{"role": "assistant", "content": "<think>7</think>\n8"}, {"role": "tool", "content": "9"}]
    assert final_reply(Sample(messages=messages)) == "8"
    assert final_reply(Sample(response="10")) == "10"
    assert final_reply(Sample(messages=[{"role": "user", "content": "?"}], response="10")) == ""


def test_numbers_as_people_write_them() -> None:
    """Exactly, and only finite ones."""
    assert decimal(" $1,250.50 ") == Decimal("1250.50")
    assert [decimal(text) for text in ("1,000,000.5", "5,")] == [Decimal("1000000.5"), 5]
    assert [decimal(text) for text in ("NaN", "1,5", "1,0000", "1000,000", "1,,000")] == [None] * 5
    assert decimal("many") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### .5", "0.5"),
        ("The answer is -.5", "-0.5"),
        ("#### 1e5", "100000"),
        ("\\boxed{1{,}000}", "1000"),
        ("\\boxed{10,\\!000}", "10000"),
        ("\\boxed{-\\$5}", "-5"),
        ("#### \N{MINUS SIGN}5", "-5"),
        ("see 1.2.", "1.2"),
        ("#### 1e9999999", None),
    ],
)
def test_a_number_is_read_whole(text: str, expected: str | None) -> None:
    """A part of a number is another number, which would be right for another label."""
    assert final_number(text) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # fractions
        ("#### 1/2", "0.5"),
        ("The answer is -3 / 4.", "-0.75"),
        ("\\boxed{\\frac{14}{4}}", "3.5"),
        ("\\boxed{-\\dfrac12}", "-0.5"),
        ("\\boxed{3\\frac{1}{2}}", "3.5"),
        ("it takes 1 1/2 hours", "1.5"),
        ("#### 1/0", None),
        # larger expressions
        ("#### 2^3", None),
        ("\\boxed{2^{3}}", None),
        ("#### 1,5", None),
        ("#### 1,0000", None),
        ("\\boxed{3, 4}", None),
        ("#### 12:30", None),
        ("#### 3/4/2024", None),
        ("#### 1.2.3", None),
        ("#### 10-12", None),
        ("#### 10 - 12", None),
        ("he pays 5*12", None),
        ("he pays 5 * 12", None),
        ("between 10-12", None),
        ("\\boxed{2x}", None),
        ("\\boxed{x - 2}", None),
        ("\\boxed{n/2}", None),
        ("\\boxed{2\\pi}", None),
        ("\\boxed{\\sqrt{2}}", None),
        ("\\boxed{\\frac{2}{\\pi}}", None),
        ("\\boxed{\\log_2 8}", None),
        ("\\boxed{5 \\times 10^6}", None),
        ("which is 2^{10}", None),
        ("\\boxed{\\frac{1}{2} + 3}", None),
        # the result of an expression
        ("The answer is 3 + 4 = 7 apples, 2 each", "7"),
        ("\\boxed{x = 5}", "5"),
        ("\\boxed{2^3 = 8}", "8"),
        # signs, marks, units and words around a number
        ("The answer is **72**.", "72"),
        ("**72** 5", "5"),
        ("*72* 3 of them", "3"),
        ("Step 1\n- 72 apples\n- x", "72"),
        ("as in [1] 72", "72"),
        ("Total - 5", "5"),
        ("The answer is +5!", "5"),
        ("\\boxed{90^\\circ}", "90"),
        ("\\boxed{50\\%}", "50"),
        ("\\boxed{5\\text{ km}}", "5"),
        ("\\boxed{60\\text{ km}/\\text{h}}", "60"),
        ("#### 60/hour", "60"),
        ("#### 72cm", "72"),
        ("The answer is 5 (2 for each).", "5"),
        ("The answer is 5: all of them", "5"),
        ("$\\boxed{10, 000}$", "10000"),
    ],
)
def test_a_number_that_is_part_of_an_expression_is_not_the_answer(text: str, expected: str | None) -> None:
    """A fraction is its value; signs, marks and units around a number are not operators."""
    assert final_number(text) == (None if expected is None else Decimal(expected))


def test_openings_that_a_model_repeats_are_read_in_linear_time() -> None:
    """A loop of thousands of boxes or tags without an end does not hold the interpreter for half a minute."""
    began = time.process_time()
    assert boxed("\\boxed{" * 5_000) is None
    assert final_answer("<answer>" * 10_000) == "<answer>" * 10_000
    assert time.process_time() - began < 2
