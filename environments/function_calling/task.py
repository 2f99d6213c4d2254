"""The task in three parts: rows with their own functions, one reply, and a reward that compares calls.

Invariant: the reward is 1 only if the first reply contains exactly the expected calls, each with every required
argument, no unknown argument, and allowed values. No function is ever run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.training import Sample, load_prompts
from rollouts.training.prompt_files import Columns

__all__ = ["FunctionCalling", "call_reward", "load_calls", "tool_of"]

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "any": None, "int": "integer"}
"""The leaderboard's names of JSON Schema types."""

_LOOSE = re.compile(r"[ ,./\-_*^]")
_OPTIONAL = ""
"""Among the allowed values: the argument may be left out."""


class FunctionCalling:
    """An environment with the prompt's functions as tools, which ends at the first reply.

    Raises:
        ConfigError: on ``start``: the prompt's ``metadata["tools"]`` is not a list of functions.
    """

    def __init__(self) -> None:
        self._tools: tuple[Tool, ...] = ()

    @property
    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self._tools = _tools(prompt)
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        return StepResult(done=True, metrics={"calls": len(reply.tool_calls)})

    async def snapshot(self) -> None:
        """No state: the tools are in the prompt."""

    async def restore(self, prompt: Prompt, snapshot: None) -> None:
        self._tools = _tools(prompt)

    async def close(self) -> None:
        return None


def load_calls(path: str | Path, *, limit: int | None = None, **columns: Unpack[Columns]) -> list[Prompt]:
    """Load the rows of a JSONL file: ``metadata["tools"]`` has the functions, ``label`` the calls.

    A label is ``[{function: {argument: [value, …]}}]``; ``""`` among the values marks an optional argument.

    Raises:
        ConfigError: as :func:`rollouts.training.load_prompts`; or an invalid row, with its number.
    """
    prompts = load_prompts(path, limit=limit, **columns)
    for number, prompt in enumerate(prompts, 1):
        try:
            names = {found.name for found in _tools(prompt)}
            wanted = _wanted(prompt.label)
        except (ConfigError, RewardFailure) as error:
            raise ConfigError(f"{path}, row {number}: {error}") from None
        unknown = {name for name, _ in wanted} - names
        if unknown:
            raise ConfigError.of(f"{path}, row {number}: label", sorted(unknown), f"functions among {sorted(names)}")
    return prompts


def call_reward(sample: Sample) -> float:
    """1.0 if the reply contains exactly the expected calls, in any order, else 0.0.

    Raises:
        RewardFailure: the label has no calls.
    """
    wanted = _wanted(sample.label)
    replies = [message for message in sample.messages if message["role"] == "assistant"]
    calls = replies[0].get("tool_calls") or [] if replies else []
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return float(_matched(wanted, made))


def tool_of(function: Any) -> Tool:
    """Convert a function of the leaderboard, or a tool of the chat format, to a tool.

    The types are then the types of JSON Schema, and the name has no dots; other keys stay as they are.

    Raises:
        ConfigError: a missing name, or parameters that are not an object.
    """
    plain = function.get("function", function) if isinstance(function, Mapping) else None
    if not isinstance(plain, Mapping) or not isinstance(plain.get("name"), str):
        raise ConfigError.of("tool", function, "an object with name, description and parameters")
    parameters = _schema(plain.get("parameters") or {"type": "object", "properties": {}})
    return Tool.from_chat({**plain, "name": _plain_name(plain["name"]), "parameters": parameters})


def _tools(prompt: Prompt) -> tuple[Tool, ...]:
    functions = prompt.metadata.get("tools")
    if not isinstance(functions, Sequence) or not functions:
        raise ConfigError.of("metadata['tools']", functions, "a list of functions")
    return tuple(tool_of(function) for function in functions)


def _plain_name(name: str) -> str:
    return name.replace(".", "_")


def _schema(value: Any) -> Any:
    if isinstance(value, Mapping):
        plain = {key: _schema(inner) for key, inner in value.items()}
        kind = plain.get("type")
        if isinstance(kind, str) and kind in _TYPES:
            known = _TYPES[kind]
            plain = {key: inner for key, inner in plain.items() if key != "type"} | ({"type": known} if known else {})
        return plain
    return [_schema(inner) for inner in value] if isinstance(value, list) else value


# -- comparing --------------------------------------------------------------------------------------------------------

Wanted = list[tuple[str, Mapping[str, Sequence[Any]]]]


def _wanted(label: Any) -> Wanted:
    """The label's calls.

    Raises:
        RewardFailure: the label is invalid.
    """
    calls: Wanted = []
    for entry in label if isinstance(label, list) else ():
        for name, arguments in entry.items() if isinstance(entry, Mapping) else ():
            if isinstance(arguments, Mapping) and all(isinstance(values, list) for values in arguments.values()):
                calls.append((_plain_name(name), arguments))
    if not calls or len(calls) != len(label):
        expected = "[{function: {argument: [values allowed]}}]"
        raise RewardFailure(f"label: got {shortened(label)}; expected {expected}")
    return calls


def _matched(wanted: Wanted, made: list[tuple[str, Any]]) -> bool:
    """Whether calls and expected calls match one to one: a matching of the bipartite graph, by augmenting paths."""
    if len(wanted) != len(made):
        return False
    fits = [[number for number, entry in enumerate(wanted) if _is_call(entry, call)] for call in made]
    taken: dict[int, int] = {}
    return all(_is_placed(call, fits, taken, set()) for call in range(len(made)))


def _is_placed(call: int, fits: list[list[int]], taken: dict[int, int], seen: set[int]) -> bool:
    """Give a call an expected one, ``taken``'s key; the call that has it moves to another one, if there is one."""
    for number in fits[call]:
        if number not in seen:
            seen.add(number)
            if number not in taken or _is_placed(taken[number], fits, taken, seen):
                taken[number] = call
                return True
    return False


def _is_call(wanted: tuple[str, Mapping[str, Sequence[Any]]], made: tuple[str, Any]) -> bool:
    name, allowed = wanted
    if made[0] != name or not isinstance(made[1], Mapping) or set(made[1]) - set(allowed):
        return False
    return all(
        _is_among(made[1][argument], values) if argument in made[1] else _OPTIONAL in values
        for argument, values in allowed.items()
    )


def _is_among(value: Any, values: Sequence[Any]) -> bool:
    return any(_equal(value, allowed) for allowed in values)


def _equal(value: Any, allowed: Any) -> bool:
    """Compare texts without case and punctuation, numbers by value, lists in order, objects key by key."""
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    if isinstance(value, str) and isinstance(allowed, str):
        return _LOOSE.sub("", value).lower().replace("'", '"') == _LOOSE.sub("", allowed).lower().replace("'", '"')
    if isinstance(value, int | float) and isinstance(allowed, int | float):
        return value == allowed
    if isinstance(value, list) and isinstance(allowed, list):
        return len(value) == len(allowed) and all(map(_equal, value, allowed))
    if isinstance(value, Mapping) and isinstance(allowed, Mapping):
        choices = {key: inner if isinstance(inner, list) else [inner] for key, inner in allowed.items()}
        return _is_call(("", choices), ("", value))
    return value is None and allowed is None
