"""What a reply commits to: its final text, number, boxed expression or choice.

Invariant: pure text in, text out; a reply that commits to nothing gives ``None``, which a rule scores as wrong. This
module knows no label and no reward.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from rollouts.training.types import Sample

__all__ = ["boxed", "decimal", "final_answer", "final_choice", "final_number", "final_reply"]

_NUMBER = re.compile(r"-?\$?-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_MARKS = (re.compile(r"\\boxed\s*\{"), re.compile(r"####"), re.compile(r"answer is", re.IGNORECASE))
"""Where a reply may say its final answer, most binding first; without any, its last number counts."""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_SAID = re.compile(r"(?:answer is|answer:|####)[ \t]*([^\n]+)", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\s*\{")


def final_reply(sample: Sample) -> str:
    """The text of the last thing the model said, without its thinking; ``""`` if it said nothing."""
    replies = [message for message in sample.messages if message.get("role") == "assistant"]
    text = str(replies[-1].get("content") or "") if replies else "" if sample.messages else sample.response
    return text.rpartition("</think>")[2].strip()


def boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{…}``, its inner braces balanced; ``None`` without one that is closed."""
    for match in reversed(list(_BOX.finditer(text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if not depth:
                return text[match.end() : position].strip()
    return None


def final_answer(text: str) -> str:
    """The answer as text: the last ``<answer>…</answer>``, ``\\boxed{…}``, what follows ``the answer is``, else all."""
    tagged = _TAGGED.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    box = boxed(text)
    if box is not None:
        return box
    said = _SAID.findall(text)
    return (said[-1] if said else text).strip()


def final_number(text: str) -> Decimal | None:
    """The number that a text commits to: the last of its marked answers, else its last number."""
    for mark in _MARKS:
        ends = [match.end() for match in mark.finditer(text)]
        if ends:
            found = _NUMBER.search(re.split(r"[\n}]", text[ends[-1] :])[0])
            return decimal(found[0]) if found else None
    numbers = _NUMBER.findall(text)
    return decimal(numbers[-1]) if numbers else None


def final_choice(text: str, letters: str) -> str | None:
    """The letter that a text commits to: the marked one, else the only one that stands alone."""
    alone = rf"(?<![A-Za-z])\(?([{letters}])\)?(?![A-Za-z'’])"
    marked = final_answer(text)
    found = re.match(alone, re.sub(r"^(?:\\text\s*\{|[*\s])*", "", marked))
    if marked != text.strip() or (found and len(marked) <= len("(A)")):
        return found[1] if found else None
    letters_alone = set(re.findall(alone, text))
    return letters_alone.pop() if len(letters_alone) == 1 else None


def decimal(text: str) -> Decimal | None:
    """A number as people write it (``$1,250.50``), exactly; ``None`` for what is none."""
    try:
        number = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
