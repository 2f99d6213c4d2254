"""Extraction of the final answer of a reply: text, number, boxed expression or choice.

Invariant: pure functions of text; ``None`` if the reply has no such answer, which a rule scores as wrong. This module
does not know labels or rewards.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from rollouts.dtypes import chat_text
from rollouts.training.types import Sample

__all__ = [
    "boxed",
    "decimal",
    "final_answer",
    "final_choice",
    "final_number",
    "final_reply",
    "numbers",
    "tagged_text",
]

_NUMBER = re.compile(r"-?\$?-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+(?!\w))?")
_LARGEST_EXPONENT = 5_000
"""Arithmetic of decimals raises an error above 999,999."""
_WRITTEN = {"{,}": ",", ",\\!": ",", "\\$": "$", "\u2212": "-"}
"""LaTeX and signs of numbers, with what they mean: ``1{,}000``, ``1,\\!000``, ``\\$5``, and the minus of typography."""
_MARKS = (re.compile(r"\\boxed\s*\{"), re.compile(r"####"), re.compile(r"answer is", re.IGNORECASE))
"""Marks in front of a final answer, highest priority first; without a mark, the last number counts."""

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_ANNOUNCED = re.compile(r"(?:answer is|answer:|####)[ \t]*([^\n]+)", re.IGNORECASE)
_BRACE = re.compile(r"(\\boxed\s*)?\{|\}")


def final_reply(sample: Sample) -> str:
    """Text of the last assistant message, without its thinking; ``""`` if there is none."""
    replies = [message for message in sample.messages if message.get("role") == "assistant"]
    text = chat_text(replies[-1].get("content")) if replies else "" if sample.messages else sample.response
    return text.rpartition("</think>")[2].strip()


def boxed(text: str) -> str | None:
    """Content of the last closed ``\\boxed{…}``, with balanced inner braces; ``None`` if there is none."""
    last, found, opened = -1, None, list[tuple[int, bool]]()
    for match in _BRACE.finditer(text):  # once over the text: a model may repeat an opening thousands of times
        if match[0] != "}":
            opened.append((match.end(), match[1] is not None))
        elif opened:
            start, of_box = opened.pop()
            if of_box and start > last:
                last, found = start, text[start : match.start()].strip()
    return found


def final_answer(text: str) -> str:
    """The answer as text: the last ``<answer>…</answer>``, else ``\\boxed{…}``, else after ``answer is``, else all."""
    tagged = tagged_text(text)
    if tagged is not None:
        return tagged
    box = boxed(text)
    if box is not None:
        return box
    announced = _ANNOUNCED.findall(text)
    return (announced[-1] if announced else text).strip()


def tagged_text(text: str) -> str | None:
    """The text of the last ``<answer>…</answer>``; a tag that is opened inside is part of it; ``None`` without one."""
    found, start = None, -1
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = tag.end() if start < 0 else start
        elif start >= 0:
            found, start = text[start : tag.start()].strip(), -1
    return found


def final_number(text: str) -> Decimal | None:
    """The number after the last mark of the highest priority, else the last number; ``None`` if there is none."""
    for written, meant in _WRITTEN.items():
        text = text.replace(written, meant)
    for mark in _MARKS:
        ends = [match.end() for match in mark.finditer(text)]
        if ends:
            number = _NUMBER.search(re.split(r"[\n}]", text[ends[-1] :])[0])
            return decimal(number[0]) if number else None
    return (numbers(text) or [None])[-1]


def numbers(text: str) -> list[Decimal | None]:
    """Every number that is written in text, in order, as :func:`decimal`."""
    return [decimal(number) for number in _NUMBER.findall(text)]


def final_choice(text: str, letters: str) -> str | None:
    """The marked letter, else the only one of ``letters`` that stands alone; ``None`` if it is not unique."""
    alone = rf"(?<![A-Za-z])\(?([{letters}])\)?(?![A-Za-z'’])"
    marked = final_answer(text)
    letter = re.match(alone, re.sub(r"^(?:\\text\s*\{|[*\s])*", "", marked))
    if marked != text.strip() or (letter and len(marked) <= len("(A)")):
        return letter[1] if letter else None
    letters_alone = set(re.findall(alone, text))
    return letters_alone.pop() if len(letters_alone) == 1 else None


def decimal(text: str) -> Decimal | None:
    """Parse a written number (``$1,250.50``) exactly; ``None`` if it is not finite, or has thousands of digits."""
    try:
        number = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) <= _LARGEST_EXPONENT else None
