"""Rewards by rule: the reply's final answer against the label, in plain Python.

Invariant: 1.0 means that the reply commits to the label, 0.0 that it does not; a label that cannot be compared is a
:class:`RewardFailure`, because no reply could be right. Each is a ``reward_fn``; options are bound with ``partial``.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

from rollouts.errors import RewardFailure, shortened
from rollouts.training.rewards.answers import decimal, final_answer, final_choice, final_number, final_reply
from rollouts.training.types import Sample

__all__ = ["exact_match", "f1_score", "multiple_choice", "numeric_match", "references"]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(sample: Sample, *, loose: bool = True) -> float:
    """1.0 if the final answer is one of the label's texts.

    Args:
        sample: scored by its last reply.
        loose: compare without case, punctuation, articles and repeated spaces.
    """
    said = final_answer(final_reply(sample))
    wanted = references(sample)
    if loose:
        # What is nothing but punctuation is compared as it stands: "" would be equal to any other such text.
        said, wanted = _plain(said) or said, [_plain(text) or text for text in wanted]
    return float(said in wanted)


def numeric_match(sample: Sample, *, absolute: float = 0.0, relative: float = 0.0) -> float:
    """1.0 if the final number is the label, or no further from it than ``absolute`` or ``relative * |label|``."""
    said = final_number(final_reply(sample))
    wanted = _number(sample)
    if said is None:
        return 0.0
    return float(abs(said - wanted) <= max(Decimal(str(absolute)), Decimal(str(relative)) * abs(wanted)))


def multiple_choice(sample: Sample, *, letters: str = "ABCDEFGHIJ") -> float:
    """1.0 if the reply commits to the letter that is the label."""
    wanted = str(sample.label).strip().strip("().").upper()
    if wanted not in letters or len(wanted) != 1:
        raise RewardFailure(f"label: got {shortened(sample.label)}; expected one letter of {letters}")
    return float(final_choice(final_reply(sample), letters) == wanted)


def f1_score(sample: Sample) -> float:
    """The best harmonic mean of precision and recall in words, over the label's texts: between 0 and 1."""
    said = _plain(final_answer(final_reply(sample))).split()
    return max(_f1(said, _plain(text).split()) for text in references(sample))


def references(sample: Sample) -> list[str]:
    """The label as texts: one, or several that are equally right.

    Raises:
        RewardFailure: there is none, or one is empty.
    """
    label = sample.label
    several = isinstance(label, Sequence) and not isinstance(label, str | bytes)
    texts = [str(text).strip() for text in label] if several else [str(label).strip()]
    if label is None or not texts or not all(texts):
        raise RewardFailure(f"label: got {shortened(label)}; expected a text, or several")
    return texts


def _number(sample: Sample) -> Decimal:
    number = decimal(str(sample.label))
    if number is None or isinstance(sample.label, bool):
        raise RewardFailure(f"label: got {shortened(sample.label)}; expected a number")
    return number


def _plain(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted))
