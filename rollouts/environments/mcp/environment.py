"""An environment with the tools of MCP servers and its own.

Invariant: each call gets one tool message, or the episode fails with a named cause. A tool's error, a timeout and a
server that ends during a call become messages to the model; an unreachable server fails the episode. Content that the
model does not see, e.g. a sound, is described and counted.

This module does not know the transport; :mod:`rollouts.environments.mcp.session` does.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import attrs
import msgspec

from rollouts.dtypes import Content, Image, Message, Prompt, Tool, ToolCall
from rollouts.environments.base import StepResult, ToolEnvironment, ToolResult
from rollouts.environments.mcp.server import McpServer
from rollouts.environments.mcp.session import McpSession, SessionOver, ToolRefused
from rollouts.errors import ConfigError

__all__ = ["McpEnvironment"]


class McpEnvironment(ToolEnvironment):
    """An environment whose tools are the tools of MCP servers, and its methods marked with ``tool``.

    A reply without calls ends the episode; override :meth:`answer` to change this.

    Args:
        servers: the MCP servers; the names of all tools must differ.
        system_prompt: prepended to a prompt without a system message.
        images: whether the model sees images; without, they are described as other content.
    """

    def __init__(self, *servers: McpServer, system_prompt: str = "", images: bool = False) -> None:
        self.servers = servers
        self.images = images
        self.system_prompt = system_prompt or self.system_prompt
        self._sessions: dict[int, McpSession] = {}
        self._counts: Counter[str] = Counter()

    @property
    def tools(self) -> Sequence[Tool]:
        tools = [*super().tools, *(tool for server in self.servers for tool in server.tools)]
        return tools if self._server_of else ()  # _server_of raises on duplicate names

    @functools.cached_property
    def _server_of(self) -> dict[str, int]:
        """Tool name to the index of its server; -1 for own methods."""
        owners = {tool.name: -1 for tool in super().tools}
        for index, server in enumerate(self.servers):
            for tool in server.tools:
                if tool.name in owners:
                    other = self.servers[owners[tool.name]].name if owners[tool.name] >= 0 else type(self).__name__
                    expected = f"names that differ: {server.name} and {other} both have it (McpServer.only chooses)"
                    raise ConfigError.of("McpEnvironment.tools", tool.name, expected)
                owners[tool.name] = index
        return owners

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        for index in sorted({index for index in self._server_of.values() if index >= 0}):
            self._sessions[index] = await self.servers[index].take()
        return await super().start(prompt)

    async def step(self, reply: Message) -> StepResult:
        self._counts.clear()
        result = await super().step(reply)
        return attrs.evolve(result, metrics={**result.metrics, **self._counts})

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        async with contextlib.AsyncExitStack() as stack:  # gives all back, also if one raises
            stack.push_async_callback(super().close)
            for index, session in sessions.items():
                stack.push_async_callback(self.servers[index].give_back, session)

    async def _run(self, call: ToolCall) -> tuple[ToolResult, bool]:
        index = self._server_of[call.name]
        if index < 0:
            return await super()._run(call)
        failed = True
        content: Content
        try:
            result = await self._sessions[index].call(call.name, dict(call.arguments))
            failed = bool(result.isError)
            content = await anyio.to_thread.run_sync(self._content_of, result) if self.images else self._text_of(result)
            content = _as_error(content) if failed else content
        except ToolRefused as error:
            content = f"Error: {error}"
        except SessionOver as error:
            await self._reopen(index)
            content = f"Error: {error}. It has been restarted; whether this call had an effect is not known."
        return ToolResult(content), failed

    async def _reopen(self, index: int) -> None:
        """Replace a lost session. Raises SessionOver, which fails the episode, if that is not possible."""
        self._counts["mcp_sessions_lost"] += 1
        server = self.servers[index]
        await server.give_back(self._sessions.pop(index))
        self._sessions[index] = await server.take()

    def _content_of(self, result: Any) -> Content:
        """A result as strings and images, one below the other."""
        parts: list[str | Image] = []
        for block in result.content:
            part = self._image(block) or self._block(block)
            both = isinstance(part, str) and parts and isinstance(parts[-1], str)
            parts += ["\n", part] if both else [part]
        return tuple(parts) if parts else self._text_of(result)

    def _text_of(self, result: Any) -> str:
        """A result as text; content that is not text is described."""
        texts = [self._block(block) for block in result.content]
        if not result.content and result.structuredContent is not None:
            texts = [msgspec.json.encode(result.structuredContent).decode()]
        return "\n".join(texts)

    def _image(self, block: Any) -> Image | None:
        """The image of a block; ``None`` for another one, and for an image that cannot be decoded."""
        if block.type != "image":
            return None
        try:
            return Image.of(f"data:{block.mimeType};base64,{block.data}")
        except ConfigError:
            return None

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


def _as_error(content: Content) -> Content:
    return f"Error: {content}" if isinstance(content, str) else ("Error: ", *content)
