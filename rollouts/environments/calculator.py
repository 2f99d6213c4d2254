"""A calculator with four tools, and an endless generator of small problems.

The model may calculate in several steps. A reply without a tool call is its final answer and ends the episode.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

from rollouts.dtypes import Prompt
from rollouts.environments.base import ToolEnvironment, tool
from rollouts.errors import ConfigError

__all__ = ["CalculatorEnvironment", "calculator_prompts"]


class CalculatorEnvironment(ToolEnvironment):
    """Tools to add, subtract, multiply and divide; whole results have no decimal point."""

    system_prompt = "Use the tools. Finish with: The answer is N."

    async def snapshot(self) -> None:
        """``None``: no state is kept between steps. A subclass with state overrides this and ``restore``."""

    async def restore(self, prompt: Prompt, snapshot: None) -> None:
        return None

    @tool
    def add(self, a: float, b: float) -> str:
        """Add b to a."""
        return _format(a + b)

    @tool
    def subtract(self, a: float, b: float) -> str:
        """Subtract b from a."""
        return _format(a - b)

    @tool
    def multiply(self, a: float, b: float) -> str:
        """Multiply a by b."""
        return _format(a * b)

    @tool
    def divide(self, a: float, b: float) -> str:
        """Divide a by b."""
        return _format(a / b)


def _format(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


_PHRASES = {
    "+": (
        "What is {a} + {b}?",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "{a} plus {b}?",
        "Increase {a} by {b}.",
    ),
    "-": (
        "What is {a} - {b}?",
        "Subtract {b} from {a}.",
        "Take {b} away from {a}.",
        "{a} minus {b}?",
        "Decrease {a} by {b}.",
    ),
    "*": (
        "What is {a} * {b}?",
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "{a} times {b}?",
        "What is {a} multiplied by {b}?",
    ),
}
_PAIRS = {first + second for first in _PHRASES for second in _PHRASES}
_APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def calculator_prompts(
    seed: int,
    *,
    two_step_share: float = 0.5,
    numbers: tuple[int, int] = (1, 99),
    pairs: Collection[str] | None = None,
) -> Iterator[Prompt]:
    """Yield problems of one or two steps without end; the same seed yields the same problems.

    ``numbers`` are the least and the greatest number in the text of a problem. ``pairs`` are the operators of problems
    of two steps in the order of calculation, such as ``"+*"``; ``None`` for all of them.

    ``label`` and ``metadata["ground_truth"]`` are the answer as text. ``metadata["steps"]`` lists the operations as
    ``(operator, a, b)``, in the order of calculation.
    """
    low, high = numbers
    if not 1 <= low <= high <= 99:
        raise ConfigError.of(
            "calculator_prompts(numbers)", numbers, "the least and the greatest number, within 1 to 99"
        )
    if pairs is not None and not (pairs and _PAIRS.issuperset(pairs)):
        raise ConfigError.of("calculator_prompts(pairs)", pairs, f"some of {', '.join(sorted(_PAIRS))}, or None")
    rng = random.Random(seed)
    while True:
        two = rng.random() < two_step_share
        yield _two_steps(rng, numbers, _PAIRS if pairs is None else pairs) if two else _one_step(rng, numbers)


def _operand(rng: random.Random, numbers: tuple[int, int]) -> int:
    while True:  # drawn again if it is outside: a seed without limits yields what it always yielded
        number = rng.randint(1, 9) if rng.random() < 0.3 else rng.randint(10, 99)
        if numbers[0] <= number <= numbers[1]:
            return number


def _one_step(rng: random.Random, numbers: tuple[int, int]) -> Prompt:
    operator = rng.choice("+-*")
    a, b = _operand(rng, numbers), _operand(rng, numbers)
    return _prompt(rng.choice(_PHRASES[operator]).format(a=a, b=b), [(operator, a, b)])


def _two_steps(rng: random.Random, numbers: tuple[int, int], pairs: Collection[str]) -> Prompt:
    first, second = rng.choice("+-*"), rng.choice("+-*")
    while first + second not in pairs:
        first, second = rng.choice("+-*"), rng.choice("+-*")
    a, b, c = _operand(rng, numbers), _operand(rng, numbers), _operand(rng, numbers)
    inner = _APPLY[first](a, b)
    if rng.random() < 0.5:
        return _prompt(f"What is ({a} {first} {b}) {second} {c}?", [(first, a, b), (second, inner, c)])
    return _prompt(f"What is {c} {second} ({a} {first} {b})?", [(first, a, b), (second, c, inner)])


def _prompt(text: str, steps: list[tuple[str, int, int]]) -> Prompt:
    answer = str(_APPLY[steps[-1][0]](*steps[-1][1:]))
    return Prompt(text, label=answer, metadata={"ground_truth": answer, "steps": steps})
