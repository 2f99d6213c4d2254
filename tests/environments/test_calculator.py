"""The calculator: right results, errors for the model, problems with right answers."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from rollouts.dtypes import Message, Prompt, ToolCall
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.errors import ConfigError


async def calculated(name: str, a: Any, b: Any) -> str:
    reply = Message("assistant", "", tool_calls=(ToolCall(name, {"a": a, "b": b}, id="1"),))
    (message,) = (await CalculatorEnvironment().step(reply)).messages
    return message.content


@pytest.mark.parametrize(
    ("name", "a", "b", "text"),
    [
        ("add", 5, 3, "8"),
        ("add", 0.5, 0.25, "0.75"),
        ("subtract", 3, 5, "-2"),
        ("multiply", 12, 12.0, "144"),
        ("multiply", -1, 0, "0"),
        ("divide", 7, 2, "3.5"),
        ("divide", 6, 3, "2"),
        ("multiply", 10**12, 10**9, "1000000000000000000000"),
    ],
)
async def test_the_four_tools_calculate(name: str, a: Any, b: Any, text: str) -> None:
    """Whole results without a decimal point."""
    assert await calculated(name, a, b) == text


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("divide", 1, 0),
        ("multiply", 1e308, 10),
        ("add", float("nan"), 1),
        ("add", float("inf"), 1),
        ("add", 10**400, 1),
        ("add", "5", 3),
        ("add", True, 3),
        ("add", None, 3),
        ("add", [5], 3),
    ],
)
async def test_what_cannot_be_calculated_is_an_error_for_the_model(name: str, a: Any, b: Any) -> None:
    """Never an exception: the model reads it and may try again."""
    assert (await calculated(name, a, b)).startswith("Error: ")


async def test_an_episode_opens_and_ends() -> None:
    """With its system prompt and the question; a reply without a call is the answer."""
    environment = CalculatorEnvironment()
    assert [message.role for message in await environment.start(Prompt("What is 5 + 3?"))] == ["system", "user"]
    assert (await environment.step(Message("assistant", "The answer is 8."))).done
    assert [entry.name for entry in environment.tools] == ["add", "subtract", "multiply", "divide"]


def test_problems_are_the_same_for_a_seed() -> None:
    """Endless, and different for another one."""

    def first(seed: int) -> list[Any]:
        return [prompt.prompt for prompt in itertools.islice(calculator_prompts(seed), 50)]

    assert first(1) == first(1)
    assert first(1) != first(2)


async def test_the_answer_of_each_problem_is_what_its_steps_give() -> None:
    """Played through the tools, one after the other."""
    names = {"+": "add", "-": "subtract", "*": "multiply"}
    counts = set()
    for prompt in itertools.islice(calculator_prompts(3), 200):
        results = [await calculated(names[operator], a, b) for operator, a, b in prompt.metadata["steps"]]
        assert results[-1] == prompt.label == prompt.metadata["ground_truth"]
        counts.add(len(results))
    assert counts == {1, 2}
    only_one = itertools.islice(calculator_prompts(3, two_step_share=0), 50)
    assert {len(prompt.metadata["steps"]) for prompt in only_one} == {1}


@pytest.mark.parametrize("pairs", [None, ("+*", "-+")])
def test_problems_have_only_the_numbers_and_operators_that_are_asked_for(pairs: tuple[str, ...] | None) -> None:
    """Numbers of the text within the limits; operators of two steps in the order of calculation."""
    problems = itertools.islice(calculator_prompts(5, numbers=(60, 70), pairs=pairs), 200)
    seen = set()
    for prompt in problems:
        assert all(60 <= int(number) <= 70 for number in re.findall(r"\d+", str(prompt.prompt)))
        seen.add("".join(operator for operator, _, _ in prompt.metadata["steps"]))
    assert {each for each in seen if len(each) == 2} == set(pairs or map("".join, itertools.product("+-*", repeat=2)))


@pytest.mark.parametrize("limits", [{"numbers": (0, 9)}, {"numbers": (9, 5)}, {"pairs": ()}, {"pairs": ["/+"]}])
def test_problems_that_cannot_be_are_refused(limits: dict[str, Any]) -> None:
    """Instead of drawing numbers for ever."""
    (name,) = limits
    with pytest.raises(ConfigError, match=rf"calculator_prompts\({name}\): got"):
        next(calculator_prompts(0, **limits))
