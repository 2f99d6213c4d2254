"""A Strands agent as an environment: its own loop, tools and hooks, and our tokens.

Invariant: the agent runs between two replies and never beside them: it is asked for its next event only while the loop
waits for its answer, in the task that waits. Its model says what the loop has sampled, so ids, mask and logprobs are
kept as for any environment, nothing is tokenised twice, and a limit ends the episode before a tool runs for nothing.
An agent that shows its model another conversation than the one that grew fails its episode by name.

``functools.partial(StrandsEnvironment, make_agent)`` goes wherever an environment class goes. It knows no token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import anyio.to_thread
import attrs
from strands import Agent
from strands.models.model import Model

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError
from rollouts.integrations.strands.messages import from_strands, opening_of, reply_events, to_strands, tools_of

__all__ = ["PromptedModel", "StrandsEnvironment"]

_REMEDY = (
    "the model can only be shown what it has seen and what is new; give the agent a conversation manager that neither "
    "trims nor summarises (NullConversationManager), and a model of its own for anything beside the conversation"
)


@attrs.frozen
class _Asked:
    """What the agent shows its model."""

    messages: Sequence[Any]
    system_prompt: str | None
    tools: tuple[Tool, ...]


class PromptedModel(Model):  # type: ignore[misc]  # typed by Strands where it is installed
    """The agent's model: it says what it is told to. Give it to the agent, and leave it alone."""

    def __init__(self) -> None:
        self.asked: _Asked | None = None
        self.reply: Message | None = None

    def update_config(self, **model_config: Any) -> None:
        if model_config:
            raise ConfigError.of("PromptedModel.update_config", model_config, "nothing: the rollout's config samples")

    def get_config(self) -> dict[str, Any]:
        return {}

    def structured_output(self, *arguments: Any, **options: Any) -> Any:
        raise ConfigError("structured_output: a reply is sampled freely here; expected an agent without it")

    async def stream(
        self,
        messages: Any,
        tool_specs: Any = None,
        system_prompt: str | None = None,
        *,
        tool_choice: Any = None,
        **options: Any,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Say that the agent waits for a reply, and when it goes on, give it the reply."""
        if tool_choice is not None:
            raise ConfigError.of("tool_choice", tool_choice, "None: a reply is sampled freely here")
        self.asked = _Asked(messages, system_prompt, tools_of(tool_specs))
        yield {"messageStart": {"role": "assistant"}}
        for event in reply_events(self._said()):
            yield event

    def _said(self) -> Message:
        reply, self.reply = self.reply, None
        if reply is None:
            raise ConfigError("PromptedModel: asked by somebody else than its agent's loop")
        return reply

    def is_asked(self) -> _Asked | None:
        """What it was asked since the last time, if it was."""
        asked, self.asked = self.asked, None
        return asked


class StrandsEnvironment:
    """One run of a Strands agent.

    The agent's system prompt and tools are shown to the model; a prompt's own system message replaces the agent's. The
    episode ends when the agent does.

    Args:
        make_agent: makes a fresh agent for each episode around the model that it is given. It runs on the event loop:
            what takes long (a client to start, say) is made before.

    Raises:
        ConfigError: it makes something else, or an agent with another model.
    """

    def __init__(self, make_agent: Callable[[Model], Agent]) -> None:
        self._model = PromptedModel()
        self._agent = make_agent(self._model)
        if not isinstance(self._agent, Agent) or self._agent.model is not self._model:
            raise ConfigError.of("make_agent(model)", self._agent, "a strands.Agent whose model is the one given")
        self._events: AsyncGenerator[Any, None] | None = None
        self._shown: _Asked | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        return tools_of(self._agent.tool_registry.get_all_tool_specs())

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        system = [message.content for message in prompt.messages if message.role == "system"]
        if system:
            self._agent.system_prompt = "\n".join(system)
        said = [to_strands(message) for message in prompt.messages if message.role != "system"]
        self._events = self._agent.stream_async(said)
        asked = await self._asked()
        if asked is None:
            raise RuntimeError("the agent ended before it asked its model")
        self._shown = asked
        return opening_of(asked.messages, asked.system_prompt)

    async def step(self, reply: Message) -> StepResult:
        before = self._shown
        assert before is not None  # started
        self._model.reply = reply
        asked = self._shown = await self._asked()
        if asked is None:
            return StepResult(done=True)
        seen = len(before.messages)
        said, new = asked.messages[seen : seen + 1], asked.messages[seen + 1 :]
        grown = list(asked.messages[:seen]) == list(before.messages) and said and said[0]["role"] == "assistant"
        if not grown or not new or (asked.system_prompt, asked.tools) != (before.system_prompt, before.tools):
            what = (
                "conversation" if not (grown and new) else "system prompt" if asked.tools == before.tools else "tools"
            )
            raise RuntimeError(f"the agent changed its {what} behind the reply: {_REMEDY}")
        return StepResult([entry for message in new for entry in from_strands(message, [reply])])

    async def close(self) -> None:
        events, self._events = self._events, None
        try:
            if events is not None:
                await events.aclose()
        finally:
            await anyio.to_thread.run_sync(self._agent.cleanup)

    async def _asked(self) -> _Asked | None:
        """Let the agent run until it asks its model; ``None`` when it has ended."""
        assert self._events is not None
        async for _ in self._events:
            asked = self._model.is_asked()
            if asked is not None:
                return asked
        return None
