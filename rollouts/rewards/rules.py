"""Rule-based rewards: compare the final answer of a reply with the label.

Invariant: a label that cannot be compared is a :class:`RewardFailure`, because no reply could be correct. Each function
is a ``reward_fn``; bind options with ``partial``.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from numbers import Number
from typing import Any

from rollouts.base.validators import finite
from rollouts.errors import RewardFailure, shortened
from rollouts.rewards.answers import decimal, final_answer, final_choice, final_number, final_reply
from rollouts.training.types import Sample

__all__ = ["exact_match", "f1_score", "label_text", "multiple_choice", "numeric_match", "references"]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(sample: Sample, *, loose: bool = True) -> float:
    """1.0 if the final answer equals one of the label's texts, else 0.0.

    Args:
        sample: its last reply is compared.
        loose: ignore case, punctuation, articles and repeated spaces.
    """
    answer = final_answer(final_reply(sample))
    wanted = references(sample)
    if loose:
        # Punctuation alone is compared unchanged: all such answers would normalize to "".
        answer, wanted = _plain(answer) or answer, [_plain(text) or text for text in wanted]
    return float(answer in wanted)


def numeric_match(sample: Sample, *, absolute: float = 0.0, relative: float = 0.0) -> float:
    """1.0 if the final number differs from the label by at most ``max(absolute, relative * |label|)``, else 0.0."""
    number = final_number(final_reply(sample))
    wanted = _number(sample)
    if number is None:
        return 0.0
    return float(abs(number - wanted) <= max(Decimal(str(absolute)), Decimal(str(relative)) * abs(wanted)))


def multiple_choice(sample: Sample, *, letters: str = "ABCDEFGHIJ") -> float:
    """1.0 if the letter that the reply chooses is the label, else 0.0."""
    expected = f"one letter of {letters}"
    wanted = label_text(sample.label, expected).strip("().").upper()
    if wanted not in letters or len(wanted) != 1:
        raise RewardFailure(f"label: got {shortened(sample.label)}; expected {expected}")
    return float(final_choice(final_reply(sample), letters) == wanted)


def f1_score(sample: Sample) -> float:
    """Word-level F1 of the final answer, between 0 and 1; the maximum over the label's texts."""
    words = _plain(final_answer(final_reply(sample))).split()
    return max(_f1(words, _plain(text).split()) for text in references(sample))


def references(sample: Sample) -> list[str]:
    """Return the label as a list of texts, each of them a correct answer.

    Raises:
        RewardFailure: the label, or one of its texts, is empty, or neither text nor a number.
    """
    label, expected = sample.label, "text, or several texts"
    several = isinstance(label, Sequence) and not isinstance(label, str | bytes)
    texts = [label_text(text, expected) for text in label] if several else [label_text(label, expected)]
    if not texts or not all(texts):
        raise RewardFailure(f"label: got {shortened(label)}; expected {expected}")
    return texts


def label_text(label: Any, expected: str) -> str:
    """Return a label, text or a finite number, as text.

    Raises:
        RewardFailure: it is neither, so that no reply could equal it: ``None``, NaN (which pandas has for a missing
            label), a bool, bytes, an object.
    """
    is_number = isinstance(label, Number) and not isinstance(label, bool)
    if isinstance(label, str) or (is_number and (isinstance(label, int) or finite(label) is not None)):
        return str(label).strip()
    raise RewardFailure(f"label: got {shortened(label)}; expected {expected}")


def _number(sample: Sample) -> Decimal:
    number = decimal(label_text(sample.label, "a number"))
    if number is None:
        raise RewardFailure(f"label: got {shortened(sample.label)}; expected a number")
    return number


def _plain(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(words: list[str], wanted: list[str]) -> float:
    if not words or not wanted:
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))
