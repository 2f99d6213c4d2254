"""The configuration of an MCP server, its tools, and its sessions: one for each episode, or one shared session."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import attrs

from rollouts.base.validators import seconds
from rollouts.dtypes import Tool
from rollouts.environments.mcp.session import McpSession, SessionOver, ToolRefused, list_tools
from rollouts.errors import ConfigError

__all__ = ["McpServer"]


@attrs.define(eq=False, kw_only=True)
class McpServer:
    """One MCP server: a command that is started for each session (stdio), or a URL (streamable HTTP).

    Raises:
        ConfigError: neither or both are set, or a value is invalid.
    """

    command: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    """Program and arguments, e.g. ``("python", "-m", "mcp_server_time")``."""
    url: str | None = None
    """The endpoint, e.g. ``"http://127.0.0.1:8000/mcp"``."""
    name: str = ""
    """Used in messages; by default the last part of the command or URL."""
    env: Mapping[str, str] | None = attrs.field(default=None, repr=False)
    """Environment variables for the command, in addition to the few that the SDK passes on."""
    cwd: str | os.PathLike[str] | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """Sent with every request to the URL, e.g. an authorization; never printed."""
    only: tuple[str, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(tuple))
    """Names of the tools to offer; all by default."""
    shared: bool = False
    """Concurrent episodes share one session instead of one each; for stateless servers."""
    open_seconds: float = attrs.field(default=30.0, validator=seconds(above=0))
    """Deadline for the start and the listing of tools."""
    call_seconds: float = attrs.field(default=60.0, validator=seconds(above=0))
    """Deadline of one call; the model sees a timeout as an error."""
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
        """The server's tools. The first access requests them and blocks; a recipe does this before the run.

        Raises:
            ConfigError: the server does not answer or lists no tool, or a tool's schema is not that of an object.
        """
        with self._lock:
            if self._tools is None:
                try:
                    entries = list_tools(self)
                except (SessionOver, ToolRefused) as error:
                    raise ConfigError(f"McpServer: {error}; expected a server that lists its tools") from error
                self._tools = self._chosen([_tool_of(self.name, entry) for entry in entries])
            return self._tools

    def _chosen(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        listed = [tool.name for tool in tools]
        missing = [name for name in self.only or () if name not in listed]
        if missing or not tools:
            raise ConfigError.of(f"McpServer.only ({self.name})", self.only, f"some of the tools it lists: {listed}")
        return tuple(tool for tool in tools if self.only is None or tool.name in self.only)

    async def take(self) -> McpSession:
        """Open a session, or return the shared one. The caller returns it with :meth:`give_back`."""
        if not self.shared:
            return await McpSession.open(self)
        async with self._opening:
            if self._session is None or self._session.over:
                await self._close_shared()
                self._session = await McpSession.open(self)
            self._users += 1
            return self._session

    async def give_back(self, session: McpSession) -> None:
        """Close a session; a shared one is closed by its last user."""
        if not self.shared:
            await session.close()
            return
        self._users -= 1  # before the wait, which may be cancelled
        async with self._opening:
            if not self._users:
                await self._close_shared()

    async def _close_shared(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _tool_of(server: str, entry: Any) -> Tool:
    schema = entry.inputSchema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ConfigError.of(
            f"MCP server {server!r}, tool {entry.name!r}, inputSchema", schema, "a schema of an object"
        )
    return Tool(entry.name, entry.description or "", {"properties": {}, **schema, "type": "object"})
