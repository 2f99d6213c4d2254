"""Classes that TRL takes as its ``environment_factory``: their public methods are the tools.

Invariant: as in TRL, the schema of a tool comes from its type hints and docstring, any exception of a tool is a message
to the model, and ``get_reward`` is called once, when the model replies without a call. TRL itself is not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.dtypes import Content, Message, Prompt, Tool
from rollouts.environments.adapters.calls import call, with_content
from rollouts.environments.base import StepResult, bad_step
from rollouts.errors import ConfigError, shortened

__all__ = ["TRLEnvironment"]

_NO_TOOLS = ("reset", "get_reward")


class TRLEnvironment:
    """One episode of a class written for TRL. Bind it with ``functools.partial``.

    ``reset`` gets the columns of the data set: the metadata, and ``prompt``. The text that it returns goes to the end
    of the last user message. A rollout that a limit ends has no ``get_reward``; bind a ``reward_fn`` to score it.

    Args:
        factory: the class, or a function that creates an instance.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._inner = factory()
        self._methods: Mapping[str, Callable[..., Any]] = {
            name: getattr(self._inner, name)
            for name, _ in inspect.getmembers(type(self._inner), inspect.isfunction)
            if not name.startswith("_") and name not in _NO_TOOLS
        }
        if not callable(getattr(self._inner, "reset", None)):
            raise ConfigError.of("TRLEnvironment.factory", factory, "a class with a method reset")

    @property
    def tools(self) -> Sequence[Tool]:
        from transformers.utils.chat_template_utils import get_json_schema

        return tuple(Tool.from_chat(get_json_schema(method)) for method in self._methods.values())

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        row = {**prompt.metadata, "prompt": [message.to_chat() for message in prompt.messages]}
        observation = await call(self._inner.reset, **row)
        if observation is None:
            return prompt.messages
        if not isinstance(observation, str | list):
            expected = "a string, a list of content blocks, or None"
            raise bad_step(f"{self._name}.reset", f"got {shortened(observation)}; expected {expected}")
        return with_content(prompt.messages, _content_of(observation, f"{self._name}.reset"))

    async def step(self, reply: Message) -> StepResult:
        if not reply.tool_calls:
            if not hasattr(self._inner, "get_reward"):
                return StepResult(done=True)
            return StepResult(done=True, reward=await call(self._inner.get_reward))
        messages, failed = [], 0
        for one in reply.tool_calls:
            try:
                result = await call(self._methods[one.name], **one.arguments)
            except Exception as error:  # noqa: BLE001 - TRL shows the model any exception of a tool
                result, failed = {"error": str(error)}, failed + 1
            content = _content_of(result, f"{self._name}.{one.name}") if isinstance(result, list) else str(result)
            messages.append(Message("tool", content, tool_call_id=one.id, name=one.name))
        return StepResult(messages, metrics={"tool_errors": failed})

    async def close(self) -> None:
        return None

    @property
    def _name(self) -> str:
        return type(self._inner).__name__


def _content_of(given: str | list[Any], what: str) -> Content:
    """The strings and images of a string or of content blocks (``{"type": "image", "image": …}``)."""
    try:
        return Message.from_chat({"role": "tool", "content": given}).content
    except ConfigError as error:
        raise bad_step(what, str(error)) from None
