"""The tools of MCP servers as an environment, beside tools of one's own.

Invariant: whatever a server does, the model gets one answer to each of its calls, or the episode fails by name: a
tool's error, a late answer and a server that ended while it was asked are told to the model; a server that cannot be
reached any more fails the episode. What the model cannot be shown, an image say, is described and counted.

This module knows no transport; :mod:`rollouts.environments.mcp_session` does.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import attrs
import msgspec

from rollouts.dtypes import Message, Prompt, Tool, ToolCall
from rollouts.environments.base import StepResult, ToolEnvironment
from rollouts.environments.mcp_session import McpSession, SessionOver, ToolRefused, listed
from rollouts.errors import ConfigError

__all__ = ["McpEnvironment", "McpServer"]


def _seconds(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError.of(f"McpServer.{field.name}", value, "a number of seconds > 0")


@attrs.define(eq=False, kw_only=True)
class McpServer:
    """One MCP server: a command that is started for each session (stdio), or a URL (streamable HTTP).

    Raises:
        ConfigError: neither or both, or a value that cannot be.
    """

    command: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    """Program and arguments, e.g. ``("python", "-m", "mcp_server_time")``."""
    url: str | None = None
    """The endpoint, e.g. ``"http://127.0.0.1:8000/mcp"``."""
    name: str = ""
    """For messages; by default the command's or URL's last part."""
    env: Mapping[str, str] | None = attrs.field(default=None, repr=False)
    """Variables for the command, beside those few that the SDK passes on."""
    cwd: str | os.PathLike[str] | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """Sent with every request to the URL, e.g. an authorization; never printed."""
    only: tuple[str, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(tuple))
    """Names of the tools to offer; all by default."""
    shared: bool = False
    """One session for all episodes that overlap in time, instead of one for each: for servers that keep no state."""
    open_seconds: float = attrs.field(default=30.0, validator=_seconds)
    """Deadline for the start and the listing of tools."""
    call_seconds: float = attrs.field(default=60.0, validator=_seconds)
    """Deadline of one call; a late one is an error for the model."""
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)
    _tools: tuple[Tool, ...] | None = attrs.field(default=None, init=False, repr=False)
    _opening: anyio.Lock = attrs.field(factory=anyio.Lock, init=False, repr=False)
    _session: McpSession | None = attrs.field(default=None, init=False, repr=False)
    _users: int = attrs.field(default=0, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            got = {"command": self.command, "url": self.url}
            raise ConfigError.of("McpServer", got, "a command or a url")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError.of("McpServer.url", self.url, "a URL that starts with http:// or https://")
        self.name = self.name or (self.command or (str(self.url).rstrip("/"),))[-1].rpartition("/")[2]

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What the server offers. Asked once, and then for as long as it takes: a recipe does so before the run.

        Raises:
            ConfigError: it cannot be asked, offers nothing, or a tool whose schema is none of an object.
        """
        with self._lock:
            if self._tools is None:
                try:
                    found = listed(self)
                except (SessionOver, ToolRefused) as error:
                    raise ConfigError(f"McpServer: {error}; expected a server that lists its tools") from error
                self._tools = self._chosen([_tool_of(self.name, tool) for tool in found])
            return self._tools

    def _chosen(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        there = [tool.name for tool in tools]
        missing = [name for name in self.only or () if name not in there]
        if missing or not tools:
            raise ConfigError.of(f"McpServer.only ({self.name})", self.only, f"some of the tools it lists: {there}")
        return tuple(tool for tool in tools if self.only is None or tool.name in self.only)

    async def take(self) -> McpSession:
        """A session, of one's own or the shared one. Each is given back with :meth:`give_back`."""
        if not self.shared:
            return await McpSession.open(self)
        async with self._opening:
            if self._session is None or self._session.over:
                await self._close_shared()
                self._session = await McpSession.open(self)
            self._users += 1
            return self._session

    async def give_back(self, session: McpSession) -> None:
        """Close a session, or, of the shared one, say that one episode less uses it."""
        if not self.shared:
            await session.close()
            return
        async with self._opening:
            self._users -= 1
            if not self._users:
                await self._close_shared()

    async def _close_shared(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


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


def _tool_of(server: str, found: Any) -> Tool:
    schema = found.inputSchema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ConfigError.of(
            f"MCP server {server!r}, tool {found.name!r}, inputSchema", schema, "a schema of an object"
        )
    return Tool(found.name, found.description or "", {"properties": {}, **schema, "type": "object"})
