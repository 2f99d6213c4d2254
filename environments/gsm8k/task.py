"""The task in three parts: rows, two environments, and an exact reward.

Invariant: the reward is 1 only if the number that the last reply commits to equals the label exactly, as decimals.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from pathlib import Path

from rollouts.dtypes import Prompt
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.training import Sample, load_prompts

__all__ = ["CalculatorGSM8K", "SingleTurnGSM8K", "final_number", "gsm8k_reward", "load_gsm8k"]

_NUMBER = re.compile(r"-?\$?-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_MARKS = (re.compile(r"\\boxed\s*\{"), re.compile(r"####"), re.compile(r"answer is", re.IGNORECASE))
"""Where a reply may say its final answer, most binding first; without any, its last number counts."""


class SingleTurnGSM8K(SingleTurnEnvironment):
    """One reply with the reasoning and the answer."""

    def __init__(self) -> None:
        super().__init__(system_prompt="Solve the problem step by step. Finish with: The answer is N.")


class CalculatorGSM8K(CalculatorEnvironment):
    """The calculator does the arithmetic, in as many turns as it takes."""

    system_prompt = "Solve the problem step by step. Calculate with the tools. Finish with: The answer is N."


def load_gsm8k(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """Rows of a JSONL file whose label is a number.

    Raises:
        ConfigError: as :func:`rollouts.training.load_prompts`; or a label that is no number, by row.
    """
    prompts = load_prompts(path, limit=limit)
    for number, prompt in enumerate(prompts, 1):
        if _decimal(str(prompt.label)) is None:
            raise ConfigError.of(f"{path}, row {number}: label", prompt.label, "a number, e.g. 72")
    return prompts


def gsm8k_reward(sample: Sample) -> float:
    """1.0 if the last reply's final number equals the label, else 0.0."""
    replies = [message for message in sample.messages if message["role"] == "assistant"]
    answer = final_number(replies[-1]["content"]) if replies else None
    return float(answer is not None and answer == _decimal(str(sample.label)))


def final_number(text: str) -> Decimal | None:
    """The number that a text commits to: the last of its marked answers, else its last number."""
    for mark in _MARKS:
        ends = [match.end() for match in mark.finditer(text)]
        if ends:
            found = _NUMBER.search(re.split(r"[\n}]", text[ends[-1] :])[0])
            return _decimal(found[0]) if found else None
    numbers = _NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
