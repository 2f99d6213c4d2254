"""An environment from one async function: a simulated user, a script, or another model.

Invariant: the function sees all messages and nothing else. ``None`` or an empty result ends the episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from rollouts.dtypes import ChatDict, Message, Prompt, Tool, as_messages
from rollouts.environments.base import StepResult

__all__ = ["SimulatedUser", "UserFn"]

UserFn: TypeAlias = Callable[[Sequence[Message]], Awaitable[str | Sequence[Message | ChatDict] | None]]
"""Maps the conversation, which ends in a reply of the model, to the next text or messages; ``None`` ends it."""


class SimulatedUser:
    """An environment that calls a function for each answer.

    Args:
        user: called after each reply; it answers each tool call of the reply with a tool message.
        tools: the tools shown to the model.
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
        if self.conversation and self.conversation[-1].role == "assistant":
            self.conversation.pop()  # the start of this reply, which the prompt gave
        self.conversation.append(reply)
        answer = await self.user(tuple(self.conversation))
        if not answer:
            return StepResult(done=True)
        messages = as_messages(answer)
        self.conversation += messages
        return StepResult(messages)

    async def close(self) -> None:
        return None
