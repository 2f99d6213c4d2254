"""Tasks whose true reward is known, a model that solves a known part of them, and recipes of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.chat_api import Account, ChatEndpoint, chat_recipe
from rollouts.dtypes import Endpoint, Prompt
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.configs.calculator import exact_answer_reward
from rollouts.training import Sample

FILE = str(Path(__file__).with_name("sums_recipe.py"))
KEY = "sk-stub"


def tasks(count: int, first: int = 0) -> list[Prompt]:
    """Sums; the model is wrong where :func:`true_reward` is 0."""
    return [Prompt(f"What is {a} + 1000?", label=str(a + 1000)) for a in range(first, first + count)]


def true_reward(text: str) -> float:
    """The reward of the model's reply to a task that is played without a fault."""
    return float(_number(text) % 3 != 0)


def _number(text: str) -> int:
    return int(re.findall(r"\d+", text)[0])


def solve(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Call ``add``, then reply with its result; with another number where the true reward is 0."""
    question = next(message["content"] for message in messages if message["role"] == "user")
    if messages[-1]["role"] != "tool":
        assert [tool["function"]["name"] for tool in tools] == ["add", "subtract", "multiply", "divide"]
        arguments = msgspec.json.encode({"a": _number(question), "b": 1000}).decode()
        call = {"id": f"call_{len(messages)}", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}
    result = int(messages[-1]["content"]) + (0 if true_reward(question) else 1)
    return {"content": f"The answer is {result}."}


def sums(endpoint: Endpoint, prompts: Iterable[Prompt], **options: Any) -> Recipe:
    """The recipe of the tasks."""
    settings = {"reward_fn": exact_answer_reward, "max_turns": 4, "temperature": 0.0, "keep": "all", **options}
    return agent_recipe("sums", endpoint, CalculatorEnvironment, prompts, **settings)


def chat_sums(url: str, prompts: Iterable[Prompt], account: Account | None = None, **options: Any) -> Recipe:
    """The recipe on a chat API. Options of the endpoint begin with ``endpoint_``."""
    of_endpoint = {name.removeprefix("endpoint_"): options.pop(name) for name in [*options] if "endpoint_" in name}
    endpoint = ChatEndpoint(model="stub", base_url=url, **{"api_key": KEY, **of_endpoint})
    return chat_recipe(sums(endpoint, prompts, **options), account=account)


def false_scores(samples: Iterable[Sample]) -> list[Sample]:
    """The samples with a reward that is not the true one; a failed sample must have none."""
    wrong = []
    for sample in samples:
        expected = None if sample.failure is not None else true_reward(str(sample.prompt))
        if sample.reward != expected or (sample.failure is None) is not (sample.stop_reason == "task_completed"):
            wrong.append(sample)
    return wrong


def count_fruit(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The model of ``docs/chat_api.md``: it looks up both fruits at once, and adds the numbers."""
    if messages[-1]["role"] == "tool":
        total = sum(int(message["content"]) for message in messages if message["role"] == "tool")
        return {"content": f"There are {total}."}
    (tool,) = [tool["function"]["name"] for tool in tools]
    fruits = re.findall(r"apples|figs|pears|plums", messages[-1]["content"])
    called = [(f"call_{one}", msgspec.json.encode({"fruit": one}).decode()) for one in fruits]
    return {
        "content": None,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}
            for call_id, arguments in called
        ],
    }
