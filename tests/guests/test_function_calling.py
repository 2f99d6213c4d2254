"""Function calling: right and wrong calls, the real rows, and invalid rows."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Message, Prompt
from rollouts.errors import ConfigError, RewardFailure
from rollouts.recipes.environments.function_calling import FunctionCalling, call_reward, load_calls
from rollouts.testing.playing import calling, play
from rollouts.training import Sample

LABEL: Any = [{"geo.area": {"base": [10], "unit": ["square cm", ""], "sides": [[1, 2]], "spec": [{"fill": ["red"]}]}}]
RIGHT: dict[str, Any] = {"base": 10, "unit": "Square-CM", "sides": [1, 2], "spec": {"fill": "Red"}}


def made(*calls: tuple[str, dict[str, Any]], label: Any = LABEL) -> Sample:
    chat = [{"type": "function", "id": "0", "function": {"name": name, "arguments": given}} for name, given in calls]
    return Sample(messages=[{"role": "assistant", "content": "", "tool_calls": chat}], label=label)


@pytest.mark.parametrize(
    ("change", "reward"),
    [
        ({}, 1.0),
        ({"base": 10.0}, 1.0),
        ({"unit": ...}, 1.0),
        ({"base": ...}, 0.0),
        ({"base": "10"}, 0.0),
        ({"base": True}, 0.0),
        ({"unit": "m"}, 0.0),
        ({"sides": [2, 1]}, 0.0),
        ({"spec": {"fill": "blue"}}, 0.0),
        ({"spec": {"fill": "red", "line": 1}}, 0.0),
        ({"colour": "red"}, 0.0),
    ],
    ids=repr,
)
def test_golden_rewards_of_one_call(change: dict[str, Any], reward: float) -> None:
    """Every required argument, no unknown one, allowed values; ``""`` marks an optional argument."""
    given = {key: value for key, value in {**RIGHT, **change}.items() if value is not ...}
    assert call_reward(made(("geo_area", given))) == reward


def test_exactly_the_expected_calls() -> None:
    """Any order is right; one call too many or too few, or another function, is wrong."""
    label = [{"f": {"a": [1, 2]}}, {"f": {"a": [1]}}]
    assert call_reward(made(("f", {"a": 1}), ("f", {"a": 2}), label=label)) == 1.0
    assert call_reward(made(("f", {"a": 2}), ("f", {"a": 2}), label=label)) == 0.0
    assert call_reward(made(("f", {"a": 1}), label=label)) == 0.0
    assert call_reward(made(("g", RIGHT))) == 0.0
    assert call_reward(made()) == 0.0


def test_calls_match_where_an_order_of_them_does() -> None:
    """On random calls of overlapping values the reward is that of a trial of every order."""
    rng = random.Random(0)
    seen = set()
    for _ in range(300):
        size = rng.randint(1, 4)
        allowed = [rng.sample([1, 2, 3, ""], rng.randint(1, 3)) for _ in range(size)]
        given = [rng.choice([1, 2, 3, None]) for _ in range(size)]
        calls = [("f", {} if value is None else {"a": value}) for value in given]
        fits = any(
            all(("" if value is None else value) in values for value, values in zip(given, order, strict=True))
            for order in itertools.permutations(allowed)
        )
        assert call_reward(made(*calls, label=[{"f": {"a": values}} for values in allowed])) == float(fits)
        seen.add(fits)
    assert seen == {True, False}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("count", [12, 120])
def test_many_calls_that_fit_alike_are_matched_at_once(count: int) -> None:
    """All but one expected call fit every call, so that all orders of the calls fail alike."""
    label = [{"f": {"a": [1, ""]}}] * (count - 1) + [{"f": {"a": [2]}}]
    assert call_reward(made(*[("f", {"a": 1})] * count, label=label)) == 0.0
    assert call_reward(made(*[("f", {"a": 1})] * (count - 1), ("f", {"a": 2}), label=label)) == 1.0


@pytest.mark.parametrize("label", [None, [], "f(1)", [{"f": {"a": 1}}], [{}]], ids=repr)
def test_a_label_without_calls_is_a_failure(label: Any) -> None:
    """An invalid label raises; it never becomes a reward of 0."""
    with pytest.raises(RewardFailure, match="label: got"):
        call_reward(made(("f", {"a": 1}), label=label))


async def test_the_tools_are_the_prompts_own(asset: Callable[[str], Path]) -> None:
    """After ``start`` the tools have JSON Schema's types and names without dots; a right reply scores 1."""
    prompt = load_calls(asset("datasets/bfcl_simple_python.jsonl"))[1]
    environment = FunctionCalling()
    assert list(environment.tools) == []
    played = await play(environment, prompt, [calling("math_factorial", number=5)])
    (tool,) = environment.tools
    assert (tool.name, tool.parameters["type"]) == ("math_factorial", "object")
    assert played.done
    assert call_reward(Sample(messages=played.chat, label=prompt.label)) == 1.0


def test_every_real_row_can_be_solved(asset: Callable[[str], Path]) -> None:
    """In 400 rows the first allowed value of each argument makes a right call, and a reply without calls is wrong."""
    prompts = load_calls(asset("datasets/bfcl_simple_python.jsonl"))
    assert len(prompts) == 400
    for prompt in prompts:
        ((name, allowed),) = prompt.label[0].items()
        given = {key: _first(values[0]) for key, values in allowed.items() if values[0] != ""}
        assert call_reward(made((name.replace(".", "_"), given), label=prompt.label)) == 1.0
        assert call_reward(made((name.replace(".", "_"), {**given, "other": 1}), label=prompt.label)) == 0.0


def _first(value: Any) -> Any:
    """An allowed value, with the first choice in objects."""
    if isinstance(value, dict):
        choices = {key: inner[0] if isinstance(inner, list) else inner for key, inner in value.items()}
        return {key: _first(inner) for key, inner in choices.items() if inner != ""}
    return [_first(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "label": LABEL}, r"row 1: metadata\['tools'\]: got None"),
        ({"prompt": "a", "label": LABEL, "metadata": {"tools": [{}]}}, "row 1: tool: got"),
        ({"prompt": "a", "label": [], "metadata": {"tools": [{"name": "f"}]}}, r"row 1: label: got \[\]"),
        ({"prompt": "a", "label": LABEL, "metadata": {"tools": [{"name": "f"}]}}, "row 1: label: got .*geo_area"),
    ],
)
def test_an_invalid_row_is_refused(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The error names the row, before work starts."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=words):
        load_calls(path)


async def test_a_prompt_without_functions_is_refused() -> None:
    """The check also covers prompts that come from no file."""
    with pytest.raises(ConfigError, match=r"metadata\['tools'\]"):
        await FunctionCalling().start(Prompt((Message("user", "?"),)))


async def test_tools_of_the_chat_format_are_read_as_they_are() -> None:
    """A row may have tools as the OpenAI API takes them; the model sees ``strict``, and no invented description."""
    tool = {"type": "function", "function": {"name": "geo.area", "parameters": {"properties": {}}, "strict": True}}
    environment = FunctionCalling()
    await environment.start(Prompt("How large?", label=LABEL, metadata={"tools": [tool]}))
    (shown,) = environment.tools
    function = {"name": "geo_area", "parameters": {"properties": {}}, "strict": True}
    assert shown.to_chat() == {"type": "function", "function": function}
