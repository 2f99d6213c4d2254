"""The common job of the benchmarks of other packages: prompts, tools, replies and reward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs

from rollouts.dtypes import Tool
from rollouts.environments.base import ToolEnvironment, tool
from rollouts.renderer import Renderer, renderer_for
from rollouts.testing.canned import Canned

__all__ = ["SYSTEM", "TOOLS", "Calculator", "Job", "calculated", "restart", "reward"]

EPISODES, IN_FLIGHT, TURNS, REPLY = 256, 64, 3, 256
ANSWER, WRONG = "The answer is 8.", "The answer is 7."
SYSTEM = "Use the tools. Finish with: The answer is N."


_CALCULATIONS = [itertools.count()]


def calculated(value: float) -> str:
    """The result of each loop's tools; never twice the same, so that no loop profits from a cache."""
    return f"{value:g} (calculation {next(_CALCULATIONS[-1])})"


def restart() -> None:
    """Number the calculations from 0 again, so that another loop gets the same results."""
    _CALCULATIONS[-1] = itertools.count()


class Calculator(ToolEnvironment):
    """Our environment, and the tool schemas of all loops."""

    system_prompt = SYSTEM

    @property
    def tools(self) -> Sequence[Tool]:
        return TOOLS

    @tool
    def add(self, a: float, b: float) -> str:
        """Add b to a."""
        return calculated(a + b)

    @tool
    def subtract(self, a: float, b: float) -> str:
        """Subtract b from a."""
        return calculated(a - b)

    @tool
    def multiply(self, a: float, b: float) -> str:
        """Multiply a by b."""
        return calculated(a * b)

    @tool
    def divide(self, a: float, b: float) -> str:
        """Divide a by b."""
        return calculated(a / b)


def _described(one: Tool) -> Tool:
    """The schemas with strands' default descriptions of arguments, so that the prompts are the same."""
    arguments = one.parameters["properties"]
    described = {name: {**schema, "description": f"Property {name}"} for name, schema in arguments.items()}
    return attrs.evolve(one, parameters={**one.parameters, "properties": described})


TOOLS = tuple(_described(one) for one in super(Calculator, Calculator()).tools)


@attrs.frozen
class Job:
    """Prompts, replies and server of the job."""

    folder: str
    """Renderer of the tokenizer and its template."""
    renderer: Renderer
    canned: Canned
    """Two calls and an answer."""

    @classmethod
    def of(cls, folder: str, *, calls: bool = True) -> Job:
        """The job; without ``calls``, two wrong answers in place of them."""
        renderer = renderer_for(folder)
        assert renderer.encoder  # loads the fast encoder, as a long run does
        words = renderer.encode("One step after the other. " * 200).tolist()
        (mark,) = renderer.encode("§").tolist()[-1:]
        replies = []
        for name in ("add", "multiply", None):
            call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 2, "b": 4}}}}\n</tool_call>'
            end = renderer.encode((call if calls else WRONG) if name else ANSWER).tolist()
            replies.append([mark, *words[: REPLY - len(end) - 2], *end, renderer.stop_token_ids[0]])
        texts = [renderer.decode(reply[:-1]) for reply in replies]
        return cls(folder, renderer, Canned(replies, texts=texts, mark=mark))

    def prompts(self, number: int) -> list[str]:
        """The prompts of one round."""
        return [f"Problem {number}-{episode}: what is (2 + 2) * 2?" for episode in range(EPISODES)]


def reward(text: str) -> float:
    """Score the last message."""
    return float(ANSWER in text)
