"""Playing an environment with scripted replies, for tests of environments and their rewards.

Invariant: the environment is started once, stepped until it is done or the replies are used up, and closed once, as in
the agent loop. No model, no tokens, no server.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from rollouts.dtypes import ChatDict, Message, Prompt, ToolCall
from rollouts.environments.base import Environment, StepResult, sound_opening, sound_step

__all__ = ["Played", "calling", "play"]


@attrs.frozen
class Played:
    """A played episode."""

    messages: tuple[Message, ...]
    """The whole conversation."""
    steps: tuple[StepResult, ...]
    """The result of each step."""

    @property
    def done(self) -> bool:
        """Whether the environment ended the episode."""
        return bool(self.steps) and self.steps[-1].done

    @property
    def rewards(self) -> list[float]:
        """All rewards of the steps, in order."""
        return [reward for step in self.steps for reward in step.rewards]

    @property
    def chat(self) -> list[ChatDict]:
        """The conversation in a sample's form: ``Sample(messages=played.chat, label=…)`` can be scored."""
        return [message.to_record() for message in self.messages]


def calling(name: str, /, **arguments: Any) -> Message:
    """Create a reply that calls one tool."""
    return Message("assistant", "", (ToolCall(name, arguments, id="call_0"),))


async def play(environment: Environment, prompt: Prompt | str, replies: Iterable[Message | str]) -> Played:
    """Play one episode.

    Args:
        environment: an unused environment.
        prompt: text, or a prompt with label and metadata.
        replies: the model's replies, in order; a string is a reply without tool calls.

    Raises:
        EnvironmentFailure: start or step returned a value of a wrong type, or a number that is not finite.
        Exception: the environment's own error, after it is closed.
    """
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    steps: list[StepResult] = []
    try:
        name = type(environment).__name__
        messages = [*sound_opening(await environment.start(prompt), f"{name}.start")]
        for scripted in replies:
            reply = scripted if isinstance(scripted, Message) else Message("assistant", scripted)
            if steps and steps[-1].continuation:
                begun = messages.pop()
                messages.append(attrs.evolve(reply, content=begun.text + reply.text))
            else:
                messages.append(reply)
            steps.append(sound_step(await environment.step(reply), f"{name}.step"))
            if steps[-1].done:
                break
            messages += steps[-1].messages
            if steps[-1].continuation:
                messages[-1] = attrs.evolve(messages[-1], content=messages[-1].text + steps[-1].continuation)
    finally:
        await environment.close()
    return Played(tuple(messages), tuple(steps))
