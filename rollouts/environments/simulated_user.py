"""The other side of a conversation as one async function: a simulated user, a script, another model.

Invariant: the function sees messages only, all of them, and says what comes next; ``None`` or nothing ends the episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from rollouts.dtypes import ChatDict, Message, Prompt, Tool, as_messages
from rollouts.environments.base import StepResult

__all__ = ["SimulatedUser", "UserFn"]

UserFn: TypeAlias = Callable[[Sequence[Message]], Awaitable[str | Sequence[Message | ChatDict] | None]]
"""The conversation so far, ending in a reply of the model, to what is said next: text, messages, or ``None``."""


class SimulatedUser:
    """An environment made of a function.

    Args:
        user: says what comes after each reply. Where the reply has tool calls, it answers each with a tool message.
        tools: what the model is told of.
    """

    def __init__(self, user: UserFn, tools: Sequence[Tool] = ()) -> None:
        self.user = user
        self._tools = tuple(tools)
        self.conversation: list[Message] = []

    @property
    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.conversation = list(prompt.messages)
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        self.conversation.append(reply)
        said = await self.user(tuple(self.conversation))
        if not said:
            return StepResult(done=True)
        messages = as_messages(said)
        self.conversation += messages
        return StepResult(messages)

    async def close(self) -> None:
        return None
