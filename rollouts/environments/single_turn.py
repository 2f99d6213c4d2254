"""One question, one answer: the environment of tasks without interaction."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.base import StepResult, with_system_prompt

__all__ = ["SingleTurnEnvironment"]


class SingleTurnEnvironment:
    """Environment that ends at the first reply."""

    tools: Sequence[Tool] = ()

    def __init__(self, system_prompt: str = "") -> None:
        self.system_prompt = system_prompt

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return with_system_prompt(prompt.messages, self.system_prompt)

    async def step(self, reply: Message) -> StepResult:
        return StepResult(done=True)

    async def snapshot(self) -> None:
        """``None``: the environment has no state."""

    async def restore(self, prompt: Prompt, snapshot: None) -> None:
        return None

    async def close(self) -> None:
        return None
