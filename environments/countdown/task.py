"""The task in three parts: rows (from a file, or generated), one reply, and a reward that evaluates the equation.

Invariant: the reward is 1 only if the answer is arithmetic over exactly the given numbers with the target as its exact
value. No part of a reply is evaluated as Python.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Unpack

from rollouts.dtypes import Prompt
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError, RewardFailure
from rollouts.rewards.answers import final_reply, tagged_text
from rollouts.training import Sample, load_prompts
from rollouts.training.prompt_files import Columns

__all__ = ["Countdown", "countdown_prompts", "countdown_reward", "load_countdown"]

_LONGEST = 200
"""Maximum number of characters of an equation; longer ones are wrong."""

_QUESTION = (
    "Using the numbers {nums}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number must be used exactly once. Return the final equation in <answer> </answer> tags, "
    "for example <answer> (1 + 2) / 3 </answer>."
)

Countdown = SingleTurnEnvironment
"""One reply with the equation; the prompt contains the instructions."""


def load_countdown(path: str | Path, *, limit: int | None = None, **columns: Unpack[Columns]) -> list[Prompt]:
    """Load the rows of a JSONL file whose metadata has ``nums`` and ``target``.

    Raises:
        ConfigError: as :func:`rollouts.training.load_prompts`; or a row without them, with its number.
    """
    prompts = load_prompts(path, limit=limit, **columns)
    for number, prompt in enumerate(prompts, 1):
        try:
            _given(prompt.metadata)
        except RewardFailure as error:
            raise ConfigError(f"{path}, row {number}: {error}") from None
    return prompts


def countdown_prompts(seed: int, *, numbers: int = 3, largest: int = 99) -> Iterator[Prompt]:
    """Yield solvable problems without end, the same for the same seed; ``metadata["one_solution"]`` has a solution."""
    rng = random.Random(seed)
    while True:
        nums = [rng.randint(1, largest) for _ in range(numbers)]
        value, text = Fraction(nums[0]), str(nums[0])
        for number in rng.sample(nums[1:], len(nums) - 1):
            sign = rng.choice("+-*")
            value = {"+": value + number, "-": value - number, "*": value * number}[sign]
            text = f"({text}{sign}{number})"
        if 0 < value <= 1000:
            target = int(value)
            metadata = {"nums": nums, "target": target, "one_solution": text}
            yield Prompt(_QUESTION.format(nums=nums, target=target), label=str(target), metadata=metadata)


def countdown_reward(sample: Sample, *, format_reward: float = 0.0) -> float:
    """1.0 for an equation that uses each number once and equals the target; ``format_reward`` for any other equation.

    Raises:
        RewardFailure: the metadata has no numbers or no target.
    """
    nums, target = _given(sample.metadata)
    answer = tagged_text(final_reply(sample))
    worked_out = None if answer is None else _worked_out(answer)
    if worked_out is None:
        return 0.0
    value, used = worked_out
    return 1.0 if value == target and Counter(used) == Counter(nums) else format_reward


def _given(metadata: Any) -> tuple[list[int], Fraction]:
    nums, target = metadata.get("nums"), metadata.get("target")
    if not isinstance(nums, list) or not nums or not all(type(number) is int for number in nums):
        raise RewardFailure(f"metadata['nums']: got {nums!r}; expected a list of integers")
    if type(target) is not int:
        raise RewardFailure(f"metadata['target']: got {target!r}; expected an integer")
    return nums, Fraction(target)


def _worked_out(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an equation and the numbers in it; ``None`` if the text is not an equation."""
    text = text.partition("=")[0].replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > _LONGEST:
        return None
    used: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Div):
                return left / right
        raise ValueError(ast.dump(node))

    try:
        return value(ast.parse(text.strip(), mode="eval").body), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
