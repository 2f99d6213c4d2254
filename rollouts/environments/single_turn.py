"""One question, one answer: the environment of tasks without interaction."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.base import StepResult

__all__ = ["SingleTurnEnvironment"]


class SingleTurnEnvironment:
    """Environment that ends at the first reply."""

    def __init__(self, system_prompt: str = "") -> None:
        self.system_prompt = system_prompt

    @property
    def tools(self) -> Sequence[Tool]:
        return ()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        messages = prompt.messages
        if self.system_prompt and (not messages or messages[0].role != "system"):
            messages = (Message("system", self.system_prompt), *messages)
        return messages

    async def step(self, reply: Message) -> StepResult:
        return StepResult(done=True)

    async def snapshot(self) -> None:
        """``None``: the environment has no state."""

    async def restore(self, prompt: Prompt, snapshot: None) -> None:
        return None

    async def close(self) -> None:
        return None
