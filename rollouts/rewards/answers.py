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

_ONE = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+(?!\w))?"
_NUMBER = re.compile(rf"(-?\$?-?)(?:(\d+) +(?=\d+/\d))?({_ONE})(?:\s*/\s*({_ONE}))?")
"""Sign, whole part of a mixed number, and number or fraction: ``-$5``, ``3/4``, ``1 1/2``."""
_FRACTION = re.compile(r"(\d\s*)?\\[dtc]?frac\s*(?:\{\s*([\d.,]+)\s*\}|(\d))\s*(?:\{\s*([\d.,]+)\s*\}|(\d))")
_AFTER = re.compile(
    r"""\s*(?:[×÷·√^/]|\\(?:times|cdot|div|pm|pi|sqrt|[dtc]?frac|over)(?![a-zA-Z]))"""
    r"""|(?:\*{1,2}|\s+\*\s+)[\d(\\]|\*[a-zA-Z]|\s*[-+\u2013]\s*(?:[\d($\\]|[a-zA-Z](?!\w))"""  # 3*4, not **3**; 3 - 4
    r"""|[,.:]\d|_[\d{]|\s?[xyzn\u03c0](?!\w)"""  # 1,5 or 1.2.3 or 12:30; a base; 2x
)
_UNIT = re.compile(r"\s*(?:\^\s*\{?\s*(?:\\circ|°)|/\s*(?:[a-zA-Z]|\\(?:text|mathrm)))")
"""Units that look like operators: degrees, and ``5/hour``."""
_BEFORE = re.compile(
    r"""(?:[×÷·√±^/]|\w_|\\(?:times|cdot|div|pm|sqrt|[dtc]?frac|log|ln|exp|sin|cos|tan)(?:_\w)?)\s*[\[{(]?\s*$"""
    r"""|\]\{$|[\w)\]}]\*{1,2}$|\d\s+\*\s+$|(?:[\d)\]}]|(?<!\w)[b-zB-Z])(?:\s*\+|\s+[-\u2013]|[-\u2013])\s*$|\d[,.:]$"""
)
_BEFORE_SIGN = re.compile(r"(?:[\d)\]}]|(?<!\w)[b-zB-Z])$")
"""In front of a minus that subtracts: ``10-12``, ``x-2``."""
_CONTEXT = 24
"""Characters in front of a number, and behind it, that are looked at."""
_THOUSANDS = re.compile(r"[-+]*\d{1,3}(?:,\d{3})+(?:\.\d*)?(?:[eE][-+]?\d+)?")
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
    """The number after the last mark of the highest priority, else the last number; ``None`` if there is none.

    A fraction (``3/4``, ``\\frac{3}{4}``, ``1 1/2``) is its value. A number that is part of a larger expression is not
    the answer: of ``2^3``, ``2x``, ``1,5``, ``12:30`` or ``10 - 12`` nothing is read. After a mark, the number behind
    the last ``=`` is then the answer, if there is one.
    """
    for written, meant in _WRITTEN.items():
        text = text.replace(written, meant)
    text = _FRACTION.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2] or m[3]}/{m[4] or m[5]}", text)
    for mark in _MARKS:
        ends = [match.end() for match in mark.finditer(text)]
        if ends:
            marked = re.split(r"[\n}]", text[ends[-1] :], maxsplit=1)[0]
            if mark is _MARKS[0]:
                marked = re.sub(r",\s+(?=[-\d])", ",", marked)  # a list of numbers is not a number either
            found = [number for part in (marked, marked.rpartition("=")[2]) if (number := _NUMBER.search(part))]
            return next((value for number in found if (value := _value(number)) is not None), None)
    matches = list(_NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def numbers(text: str) -> list[Decimal | None]:
    """Every number that is written in text, in order; ``None`` in the place of a part of a larger expression."""
    return [_value(number) for number in _NUMBER.finditer(text)]


def _value(number: re.Match[str]) -> Decimal | None:
    """The value of a number or fraction; ``None`` if it is part of a larger expression, or cannot be read."""
    text, start, end = number.string, number.start(), number.end()
    before = text[max(start - _CONTEXT, 0) : start].rpartition("\n")[2]
    after = text[end : end + _CONTEXT].partition("\n")[0]
    if _BEFORE.search(before) or ("-" in number[1] and _BEFORE_SIGN.search(before)):
        return None
    if _AFTER.match(after) and not _UNIT.match(after):
        return None
    value, below = decimal(number[3]), decimal(number[4] or "1")
    if value is None or not below:
        return None
    value = value / below + Decimal(number[2] or 0) if number[4] else value
    return -value if number[1].count("-") == 1 else value


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
    """Parse a written number (``$1,250.50``) exactly; ``None`` if it is not finite, or has thousands of digits.

    A comma separates thousands: ``1,5`` is not a number, since it may be 1.5, 15, or 1 and 5.
    """
    written = text.replace("$", "").strip().rstrip(",")
    if "," in written and not _THOUSANDS.fullmatch(written):
        return None
    try:
        number = Decimal(written.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) <= _LARGEST_EXPONENT else None
