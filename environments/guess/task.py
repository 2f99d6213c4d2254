"""The game: the environment picks a number, the model guesses, the environment replies higher or lower.

Invariant: the rewards of an episode sum to at most 1: half for the bits that the guesses rule out, half for finding the
number. The state is two bounds and a count; a snapshot contains all of it.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError
from rollouts.training import Sample
from rollouts.training.step_rewards import reduced

__all__ = ["GuessEnvironment", "guess_prompts", "guess_reward"]

_NUMBER = re.compile(r"-?\d+")


class GuessEnvironment:
    """A game that ends when the number is found, or the guesses are used up.

    The prompt's ``label`` is the number; ``metadata`` has its bounds ``low`` and ``high``, and ``guesses``.

    Raises:
        ConfigError: on ``start``: a prompt without them, or a number that is not between them.
    """

    tools: Sequence[Tool] = ()

    def __init__(self) -> None:
        self.secret = self.low = self.high = self.left = 0
        self.bits = 0.0

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self._begin(prompt)
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        self.left -= 1
        numbers = _NUMBER.findall(reply.text)
        if not numbers or len(numbers[-1]) > 18:
            return self._answered("Say one whole number.", 0.0, {"no_guess": 1})
        guess = int(numbers[-1])
        if guess == self.secret:
            return StepResult(done=True, reward=0.5 + 0.5 * self._gained(guess, guess), metrics={"found": 1})
        if not self.low <= guess <= self.high:
            return self._answered(f"It is between {self.low} and {self.high}.", 0.0, {"wasted_guesses": 1})
        low, high = (guess + 1, self.high) if guess < self.secret else (self.low, guess - 1)
        gained = self._gained(low, high)
        self.low, self.high = low, high
        return self._answered("Higher." if guess < self.secret else "Lower.", 0.5 * gained, {})

    async def snapshot(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "left": self.left}

    async def restore(self, prompt: Prompt, snapshot: dict[str, Any]) -> None:
        self._begin(prompt)
        self.low, self.high, self.left = snapshot["low"], snapshot["high"], snapshot["left"]

    async def close(self) -> None:
        return None

    def _begin(self, prompt: Prompt) -> None:
        found = [prompt.label, *(prompt.metadata.get(name) for name in ("low", "high", "guesses"))]
        if not all(type(value) is int for value in found) or not found[1] <= found[0] <= found[2] or found[3] < 1:
            raise ConfigError.of("label, low, high, guesses", found, "integers, the label between low and high")
        self.secret, self.low, self.high, self.left = found
        self.bits = math.log2(self.high - self.low + 1)

    def _gained(self, low: int, high: int) -> float:
        """The share of all bits gained by shrinking the range to this one."""
        if not self.bits:
            return 1.0
        return (math.log2(self.high - self.low + 1) - math.log2(high - low + 1)) / self.bits

    def _answered(self, text: str, reward: float, metrics: dict[str, float]) -> StepResult:
        if not self.left:
            return StepResult(done=True, reward=reward, metrics=metrics)
        return StepResult([Message("user", text)], reward=reward, metrics=metrics)


def guess_reward(sample: Sample) -> float:
    """The sum of the step rewards; 0 for a game that was cut before its first guess."""
    return reduced(sample.step_rewards)


def guess_prompts(seed: int, *, high: int = 100, guesses: int = 8) -> Iterator[Prompt]:
    """Yield games without end, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        secret = rng.randint(1, high)
        text = f"I think of a whole number from 1 to {high}. You have {guesses} guesses. Say one number at a time."
        yield Prompt(text, label=secret, metadata={"low": 1, "high": high, "guesses": guesses})
