"""Environments of OpenEnv servers: one WebSocket session for each rollout.

Invariant: a session is opened at the start and closed at the end of an episode. Either the environment's MCP tools are
the tools of the model, or ``action`` maps each reply to the fields of the environment's action.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.adapters.calls import with_content
from rollouts.environments.base import StepResult, as_content, bad_step
from rollouts.errors import shortened

__all__ = ["OpenEnvEnvironment"]

_ENVELOPE = ("done", "reward", "metadata")


def _text(observation: Mapping[str, Any]) -> str:
    """The fields of an observation: its only text as it is, others as JSON."""
    fields = {name: value for name, value in observation.items() if name not in _ENVELOPE and value is not None}
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return json.dumps(fields, ensure_ascii=False) if fields else ""


class OpenEnvEnvironment:
    """One session of an OpenEnv server. Bind it with ``functools.partial``.

    ``metadata["reset"]`` of the prompt is passed to ``reset``, e.g. ``{"seed": 1}``; without a seed, an environment
    that draws its task starts each rollout of a group elsewhere.

    Args:
        base_url: the server's URL.
        action: maps the text of a reply to the fields of the action; ``None`` plays the environment's MCP tools, and a
            reply without a call ends the episode.
        observe: maps the fields of an observation to a string, an image, or a list of these.
        seconds: the longest wait for one answer of the server.
    """

    def __init__(
        self,
        base_url: str,
        *,
        action: Callable[[str], Mapping[str, Any]] | None = None,
        observe: Callable[[Mapping[str, Any]], Any] = _text,
        seconds: float = 60.0,
    ) -> None:
        self.base_url, self._action, self._observe, self._seconds = base_url, action, observe, seconds
        self._client: Any = None
        self._tools: tuple[Tool, ...] = ()

    @property
    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=self.base_url, message_timeout_s=self._seconds, mode="simulation")
        await self._client.connect()
        first = await self._client.reset(**prompt.metadata.get("reset", {}))
        if self._action is None:
            listed = (await self._client.step({"type": "list_tools"})).observation
            if not isinstance(listed.get("tools"), list):
                raise bad_step(
                    "list_tools", f"got {shortened(listed)}; expected MCP tools, or action=… for its actions"
                )
            self._tools = tuple(_tool(entry) for entry in listed["tools"])
        return with_content(prompt.messages, as_content(self._observe(first.observation)))

    async def step(self, reply: Message) -> StepResult:
        if self._action is None:
            return await self._call_tools(reply)
        try:
            fields = self._action(reply.text)
        except ValueError as error:
            return StepResult([Message("user", f"Error: {error}")], metrics={"invalid_actions": 1})
        result = await self._client.step(dict(fields))
        messages = [] if result.done else [Message("user", as_content(self._observe(result.observation)))]
        return StepResult(messages, bool(result.done), result.reward, {"invalid_actions": 0})

    async def _call_tools(self, reply: Message) -> StepResult:
        messages: list[Message] = []
        rewards: list[float] = []
        failed, done = 0, not reply.tool_calls
        for call in reply.tool_calls:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
            result = await self._client.step(action)
            error = result.observation.get("error")
            failed += error is not None
            text = _result_text(result.observation.get("result")) if error is None else f"Error: {error['message']}"
            messages.append(Message("tool", text, tool_call_id=call.id, name=call.name))
            rewards += [] if result.reward is None else [result.reward]
            done = bool(result.done)
            if done:
                break
        return StepResult(messages, done, rewards or None, {"tool_errors": failed})

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _tool(entry: Mapping[str, Any]) -> Tool:
    schema = entry.get("input_schema") or entry.get("inputSchema") or {"type": "object", "properties": {}}
    return Tool(entry["name"], entry.get("description") or "", schema)


def _result_text(result: Any) -> str:
    """A tool's result as text: that of MCP has it in ``data``."""
    value = result["data"] if isinstance(result, Mapping) and result.get("data") is not None else result
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
