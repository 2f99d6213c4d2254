"""The tools of MCP servers as an environment, beside tools of one's own.

Invariant: whatever a server does, the model gets one answer to each of its calls, or the episode fails by name: a
tool's error, a late answer and a server that ended while it was asked are told to the model; a server that cannot be
reached any more fails the episode. What the model cannot be shown, an image say, is described and counted.

This module knows no transport; :mod:`rollouts.environments.mcp.session` does.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec

from rollouts.dtypes import Message, Prompt, Tool, ToolCall
from rollouts.environments.base import StepResult, ToolEnvironment
from rollouts.environments.mcp.server import McpServer
from rollouts.environments.mcp.session import McpSession, SessionOver, ToolRefused
from rollouts.errors import ConfigError

__all__ = ["McpEnvironment"]


class McpEnvironment(ToolEnvironment):
    """An environment whose tools are those of MCP servers, and its own methods marked with ``tool``.

    A reply without calls ends the episode; override :meth:`answer` for anything else.

    Args:
        servers: whose tools; their names must differ.
        system_prompt: put before a prompt that has none.
    """

    def __init__(self, *servers: McpServer, system_prompt: str = "") -> None:
        self.servers = servers
        self.system_prompt = system_prompt or self.system_prompt
        self._sessions: dict[int, McpSession] = {}
        self._counts: Counter[str] = Counter()

    @property
    def tools(self) -> Sequence[Tool]:
        found = [*super().tools, *(tool for server in self.servers for tool in server.tools)]
        return found if self._places else ()  # the names differ

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        """Which server has which tool."""
        places = {tool.name: -1 for tool in super().tools}
        for number, server in enumerate(self.servers):
            for tool in server.tools:
                if tool.name in places:
                    other = self.servers[places[tool.name]].name if places[tool.name] >= 0 else type(self).__name__
                    expected = f"names that differ: {server.name} and {other} both have it (McpServer.only chooses)"
                    raise ConfigError.of("McpEnvironment.tools", tool.name, expected)
                places[tool.name] = number
        return places

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        for number in sorted({place for place in self._places.values() if place >= 0}):
            self._sessions[number] = await self.servers[number].take()
        return await super().start(prompt)

    async def step(self, reply: Message) -> StepResult:
        self._counts.clear()
        result = await super().step(reply)
        return attrs.evolve(result, metrics={**result.metrics, **self._counts})

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        try:
            for number, session in sessions.items():
                await self.servers[number].give_back(session)
        finally:
            await super().close()

    async def _run(self, call: ToolCall) -> tuple[Message, bool]:
        place = self._places[call.name]
        if place < 0:
            return await super()._run(call)
        failed = True
        try:
            result = await self._sessions[place].call(call.name, dict(call.arguments))
            content, failed = self._shown(result), bool(result.isError)
            content = f"Error: {content}" if failed else content
        except ToolRefused as error:
            content = f"Error: {error}"
        except SessionOver as error:
            await self._reopen(place)
            content = f"Error: {error}. It has been started anew; whether this call had an effect is not known."
        return Message("tool", content, tool_call_id=call.id, name=call.name), failed

    async def _reopen(self, place: int) -> None:
        """Raises SessionOver if there is no way back, which fails the episode."""
        self._counts["mcp_sessions_lost"] += 1
        server = self.servers[place]
        await server.give_back(self._sessions.pop(place))
        self._sessions[place] = await server.take()

    def _shown(self, result: Any) -> str:
        """What a text model can be shown of a result; the rest is described."""
        texts = [self._block(block) for block in result.content]
        if not result.content and result.structuredContent is not None:
            texts = [msgspec.json.encode(result.structuredContent).decode()]
        return "\n".join(texts)

    def _block(self, block: Any) -> str:
        if block.type == "text":
            return str(block.text)
        if block.type == "resource" and hasattr(block.resource, "text"):
            return str(block.resource.text)
        self._counts["mcp_blocks_not_shown"] += 1
        if block.type == "resource_link":
            return f"[a link to {block.uri}: not followed]"
        data = block.resource.blob if block.type == "resource" else block.data
        mime = (block.resource if block.type == "resource" else block).mimeType
        kind = {"image": "an image", "audio": "a sound"}.get(block.type, "a file")
        return f"[{kind}, {mime or 'of unknown type'}, {len(data) * 3 // 4} bytes: it cannot be shown here]"
