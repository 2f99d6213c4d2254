"""The task in three parts: rows, two environments, and an exact reward.

Invariant: the reward is 1 only if the final number of the last reply equals the label exactly, as decimals.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from rollouts.dtypes import Prompt
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.rewards import numeric_match
from rollouts.rewards.answers import decimal
from rollouts.training import Sample, load_prompts
from rollouts.training.prompt_files import Columns

__all__ = ["CalculatorGSM8K", "SingleTurnGSM8K", "gsm8k_reward", "load_gsm8k"]


class SingleTurnGSM8K(SingleTurnEnvironment):
    """One reply with the reasoning and the answer."""

    def __init__(self) -> None:
        super().__init__(system_prompt="Solve the problem step by step. Finish with: The answer is N.")


class CalculatorGSM8K(CalculatorEnvironment):
    """The calculator does the arithmetic, in several turns."""

    system_prompt = "Solve the problem step by step. Calculate with the tools. Finish with: The answer is N."


def load_gsm8k(path: str | Path, *, limit: int | None = None, **columns: Unpack[Columns]) -> list[Prompt]:
    """Load the rows of a JSONL file: a label that is a number, or ``question`` and ``answer``.

    Raises:
        ConfigError: as :func:`rollouts.training.load_prompts`; or a label that is not a number, with its row.
    """
    prompts = load_prompts(path, limit=limit, **columns, convert=_labelled)
    for number, prompt in enumerate(prompts, 1):
        if decimal(str(prompt.label)) is None:
            raise ConfigError.of(f"{path}, row {number}: label", prompt.label, "a number, e.g. 72")
    return prompts


def _labelled(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with prompt and label; the answers that the authors of the data set publish end in ``#### 72``."""
    if row.keys() == {"question", "answer"}:
        row = {"prompt": row["question"], "label": row["answer"]}
    return {**row, "label": str(row.get("label")).rpartition("####")[2].strip()}


def gsm8k_reward(sample: Sample) -> float:
    """1.0 if the last reply's final number equals the label, else 0.0."""
    return numeric_match(sample)
