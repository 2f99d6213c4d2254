"""One episode of a recipe's environment whose replies come from an external client.

Invariant: steps run one at a time, and none runs after the last. The environment runs inside boundaries and is closed
once. The rewards sum to the reward of a rollout of the recipe: those of the steps, or, with a reward function, its
value at the last step.

This module does not know the wire format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import attrs

from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.dtypes import Limits, Message, Prompt, StopReason, Tool, ToolCall
from rollouts.environments.base import Environment, bad_step, sound_opening, sound_step, sound_tools
from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.recipe import Recipe
from rollouts.rewards import score
from rollouts.training.types import Sample, Status

__all__ = ["REPLY", "HostedEpisode", "HostedStep", "sample_of"]

REPLY = "reply"
"""Name of the tool that stands for a reply without calls; underscores are appended if the name is taken."""


@attrs.frozen
class HostedStep:
    """The result of one call."""

    texts: tuple[str, ...] = ()
    reward: float | None = None
    done: bool = False
    error: str = ""
    """Why the call was refused; ``reason`` is the standard's code."""
    reason: str = ""


@attrs.define(eq=False)
class HostedEpisode:
    """An episode: ``start`` once, then ``call`` for each step, then ``close``."""

    recipe: Recipe
    prompt: Prompt
    limits: Limits = attrs.field(factory=Limits)
    messages: list[Message] = attrs.field(factory=list)
    """The whole conversation so far."""
    opening: int = 0
    """Number of messages before the first call."""
    tools: tuple[Tool, ...] = ()
    over: bool = False
    _environment: Environment | None = None
    _rewards: list[float] = attrs.field(factory=list)
    _lock: anyio.Lock = attrs.field(factory=anyio.Lock)

    @property
    def name(self) -> str:
        return function_name(self.recipe.environment_for("serve-env"))

    @property
    def reply_tool(self) -> str:
        """The name of the tool that stands for a reply without calls."""
        name = REPLY
        while name in {tool.name for tool in self.tools}:
            name += "_"
        return name

    async def start(self) -> None:
        """Create and start the environment.

        Raises:
            EnvironmentFailure: the environment raised or missed its deadline.
        """
        with boundary(EnvironmentFailure, f"{self.name}()"):
            self._environment = environment = self.recipe.environment_for("serve-env")()
        seconds = self.limits.step_seconds
        opening = await call_foreign(
            EnvironmentFailure, f"{self.name}.start", environment.start, self.prompt, seconds=seconds
        )
        self.messages = list(sound_opening(opening, f"{self.name}.start"))
        _texts(self.messages, f"{self.name}.start")
        self.opening = len(self.messages)
        with boundary(EnvironmentFailure, f"{self.name}.tools"):
            self.tools = sound_tools(environment.tools, f"{self.name}.tools")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> HostedStep:
        """Run one tool; the reply tool takes ``{"message": text}``.

        Raises:
            EnvironmentFailure: the environment raised or missed its deadline.
            RewardFailure: the reward function raised or missed its deadline.
        """
        async with self._lock:
            if self.over:
                return HostedStep(error="the episode is over", reason="episode_finished")
            turn = sum(message.role == "assistant" for message in self.messages)
            if name == self.reply_tool:
                reply = Message("assistant", str(arguments.get("message", "")))
            elif name in {tool.name for tool in self.tools}:
                reply = Message("assistant", tool_calls=(ToolCall(name, arguments, id=f"call{turn:05d}"),))
            else:
                known = ", ".join(tool.name for tool in self.tools) or "none"
                return HostedStep(error=f"there is no tool {name!r}; the tools are: {known}", reason="not_found")
            return await self._step(reply)

    async def close(self) -> None:
        """Close the environment; raises EnvironmentFailure if that fails or is late."""
        self.over = True
        environment, self._environment = self._environment, None
        if environment is not None:
            await call_foreign(
                EnvironmentFailure,
                f"{self.name}.close",
                environment.close,
                seconds=self.limits.close_seconds,
                kind="environment_step",
            )

    async def _step(self, reply: Message) -> HostedStep:
        assert self._environment is not None, "call before start"
        what = f"{self.name}.step"
        step_fn, seconds = self._environment.step, self.limits.step_seconds
        answer = await call_foreign(EnvironmentFailure, what, step_fn, reply, seconds=seconds, kind="environment_step")
        step = sound_step(answer, what, max_bytes=self.limits.max_message_bytes)
        if step.continuation:
            expected = "messages: ORS has no text that goes on in an assistant turn"
            raise bad_step(what, str(ConfigError.of("StepResult.continuation", step.continuation, expected)))
        texts = _texts(step.messages, what)
        self.messages += [reply, *step.messages]
        self._rewards += step.rewards
        self.over = step.done
        return HostedStep(
            texts=texts,
            reward=await self._reward(step.rewards, done=step.done),
            done=step.done,
        )

    async def _reward(self, rewards: Sequence[float], *, done: bool) -> float | None:
        """The reward of a step: the sum of ``rewards``, or, with a reward function, its value at the last step."""
        config = self.recipe.config
        if config.reward_fn is None or config.group_rm:
            return sum(rewards) if rewards else None
        if not done:
            return None
        sample = sample_of(self.prompt, self.messages, self._rewards)
        await score(sample, config.reward_fn, seconds=config.reward_seconds)
        return sample.reward


def _texts(messages: Sequence[Message], what: str) -> tuple[str, ...]:
    try:
        return tuple([message.only_text("an ORS server") for message in messages])
    except ConfigError as error:
        raise bad_step(what, str(error)) from None


def sample_of(prompt: Prompt, messages: Sequence[Message], rewards: Sequence[float] = ()) -> Sample:
    """A conversation as a sample for a reward function; it has no tokens."""
    replies = [message.text for message in messages if message.role == "assistant"]
    return Sample(
        prompt=prompt.prompt,
        response="\n".join(replies),
        metadata=dict(prompt.metadata),
        label=prompt.label,
        status=Status.COMPLETED,
        stop_reason=StopReason.TASK_COMPLETED,
        messages=[message.to_chat() for message in messages],
        step_rewards=list(rewards),
        reward=sum(rewards) if rewards else None,
    )
