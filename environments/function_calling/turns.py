"""Tasks of several turns: a user with several requests, a simulated disk, and a check after each turn.

Invariant: the user messages are the row's, in order, whatever the model replies. A turn ends with a reply without
calls. It is right if the disk equals the disk after the row's own calls, and the model received every result of those
calls. The reward is 1 if all turns are right; the first wrong turn ends the episode.

The row's calls run on the same simulation, so a difference from the leaderboard's systems cannot make the row's own
calls wrong.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.dtypes import Message, Prompt, Tool, ToolCall, as_messages
from rollouts.environments.base import StepResult, ToolEnvironment
from rollouts.errors import ConfigError, shortened
from rollouts.recipes.environments.function_calling.files import FileTools
from rollouts.recipes.environments.function_calling.maths import MathTools
from rollouts.training import Sample, load_prompts
from rollouts.training.step_rewards import reduced

__all__ = ["CallsInTurns", "load_turns", "turns_reward"]

_FILES, _MATHS = "GorillaFileSystem", "MathAPI"
_EXPECTED = "calls of functions with plain values, for each of metadata['turns']"


class CallsInTurns(FileTools, MathTools, ToolEnvironment):
    """One row of :func:`load_turns`.

    Raises:
        ConfigError: on ``start``: the prompt is not such a row.
    """

    def __init__(self) -> None:
        self.put({"root": {"type": "directory", "contents": {}}})
        self.turn = 0
        """Number of finished turns."""
        self._turns: list[list[Message]] = []
        self._calls: list[list[ToolCall]] = []
        self._root: dict[str, Any] = {}
        self._systems: Sequence[str] = ()
        self._results: list[str] = []
        """The results of the model's calls. Snapshots store them under their former name."""

    @property
    def tools(self) -> Sequence[Tool]:
        if _MATHS in self._systems:
            return super().tools
        return tuple(found for found in super().tools if not hasattr(MathTools, found.name))

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self._begin(prompt)
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        result = await super().step(reply)
        self._results += [message.text for message in result.messages if message.role == "tool"]
        return result

    async def answer(self, reply: Message) -> StepResult:
        if not await self._right():
            return StepResult(done=True, reward=0.0, metrics={"turns_right": self.turn})
        self.turn += 1
        if self.turn == len(self._turns):
            return StepResult(done=True, reward=1.0, metrics={"turns_right": self.turn})
        return StepResult(self._turns[self.turn])

    async def snapshot(self) -> Any:
        return {"disk": self.disk, "way": self.way, "turn": self.turn, "results": self._results}

    async def restore(self, prompt: Prompt, snapshot: Any) -> None:
        self._begin(prompt)
        self.disk, self.way = snapshot["disk"], list(snapshot["way"])
        self.turn, self._results = snapshot["turn"], list(snapshot["results"])

    def _begin(self, prompt: Prompt) -> None:
        self._turns, self._calls, root = _row(prompt)
        self._systems = prompt.metadata["involved_classes"]
        self.put(root)
        self._root = root

    async def _right(self) -> bool:
        """Whether the turn is right: run the row's calls up to this turn on a copy of the disk, and compare."""
        other = CallsInTurns()
        other.put(self._root)
        wanted: list[str] = []
        for calls in self._calls[: self.turn + 1]:
            result = await other.step(Message("assistant", tool_calls=calls)) if calls else StepResult()
            wanted = [message.text for message in result.messages]
        left = list(self._results)
        for text in wanted:
            if text not in left:
                return False
            left.remove(text)
        return other.disk == self.disk


def turns_reward(sample: Sample) -> float:
    """The reward of the last step; 0 for an episode that was cut before."""
    return reduced(sample.step_rewards)


def load_turns(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """Load the leaderboard's conversations whose systems are simulated here: files and mathematics.

    A row has ``metadata`` with ``turns`` (the messages of each), ``involved_classes`` and ``initial_config``. Its label
    is a list of calls for each turn, in Python's syntax.

    Raises:
        ConfigError: as :func:`rollouts.training.load_prompts`; an invalid row, with its number; or no row whose
            systems are all simulated.
    """
    prompts = []
    for number, prompt in enumerate(load_prompts(path), 1):
        systems = prompt.metadata.get("involved_classes")
        if not isinstance(systems, list) or not systems:
            raise ConfigError.of(f"{path}, row {number}: metadata['involved_classes']", systems, "a list of names")
        if not {_FILES} <= set(systems) <= {_FILES, _MATHS}:
            continue
        try:
            _row(prompt)
        except ConfigError as error:
            raise ConfigError(f"{path}, row {number}: {error}") from None
        prompts.append(prompt)
    if not prompts:
        raise ConfigError.of(
            str(path), "no such row", f"rows whose involved_classes are {_FILES}, or that and {_MATHS}"
        )
    return prompts[:limit]


def _row(prompt: Prompt) -> tuple[list[list[Message]], list[list[ToolCall]], dict[str, Any]]:
    """The user's turns, the expected calls of each, and the disk."""
    turns, label = prompt.metadata.get("turns"), prompt.label
    if not isinstance(turns, list) or not turns or not isinstance(label, list) or len(label) != len(turns):
        raise ConfigError.of("label", shortened(label), f"{_EXPECTED} ({shortened(turns)})")
    config = prompt.metadata.get("initial_config")
    system = config.get(_FILES) if isinstance(config, Mapping) else None
    root = system.get("root") if isinstance(system, Mapping) else None
    if not isinstance(root, dict) or len(root) != 1:
        raise ConfigError.of(
            "metadata['initial_config']", shortened(config), f'{{"{_FILES}": {{"root": {{name: …}}}}}}'
        )
    return [list(as_messages(turn)) for turn in turns], [[_call(text) for text in calls] for calls in label], root


def _call(text: Any) -> ToolCall:
    """Parse ``mv(source='a', destination='b')`` as a call."""
    try:
        call: Any = ast.parse(text, mode="eval").body
        name = call.func.id
        method = getattr(CallsInTurns, name)
        method.__rollouts_tool__  # noqa: B018 - raises AttributeError for a method that is not a tool
        by_place = zip(list(inspect.signature(method).parameters)[1:], call.args, strict=False)
        by_name = ((entry.arg, entry.value) for entry in call.keywords)
        return ToolCall(name, {key: ast.literal_eval(value) for key, value in (*by_place, *by_name)}, id="")
    except (SyntaxError, AttributeError, ValueError, TypeError):
        raise ConfigError.of("label", text, _EXPECTED) from None
