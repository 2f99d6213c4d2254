"""Sessions with MCP servers. One task opens, uses and closes each session, in one thread for the whole process.

Invariant: the cancel scopes of the SDK and of the caller never mix. A caller waits for a future; its cancellation
or timeout ends its own request and nothing else. When a session ends, every pending call raises :class:`SessionOver`,
and the server's process is gone. The thread exists while there is a session.

This module knows no environment and no message.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime
import math
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol, TextIO, cast

import anyio
import anyio.to_thread
import attrs
from anyio.from_thread import BlockingPortal, start_blocking_portal

from rollouts.base.extras import install_command
from rollouts.errors import ConfigError, shortened

__all__ = ["McpSession", "ServerOptions", "SessionOver", "ToolRefused", "list_tools"]

_ERROR_TAIL = 2000
_PING_SECONDS = 5.0


class ServerOptions(Protocol):
    """The fields of :class:`~rollouts.environments.mcp.McpServer` that a session reads."""

    name: str
    command: tuple[str, ...]
    url: str | None
    env: Mapping[str, str] | None
    cwd: str | os.PathLike[str] | None
    headers: Mapping[str, str]
    open_seconds: float
    call_seconds: float


class SessionOver(Exception):
    """The session ended before the call was answered; whether the call had an effect is not known."""


class ToolRefused(Exception):
    """A protocol error or a timeout of one call; the session remains usable."""


class _Sessions:
    """The thread of all sessions, which exists while a session is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._thread = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None

    def enter(self) -> BlockingPortal:
        with self._lock:
            if self._portal is None:
                self._portal = self._thread.enter_context(start_blocking_portal(name="mcp sessions"))
            self._users += 1
            return self._portal

    def leave(self) -> None:
        """Close the thread after the last session; blocks until it ends."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._portal = None
                self._thread.pop_all().close()


_SESSIONS = _Sessions()


@attrs.define(eq=False)
class McpSession:
    """One session, created by :meth:`open`. The caller closes it."""

    server: ServerOptions
    _portal: BlockingPortal = attrs.field(repr=False)
    _client: Any = attrs.field(default=None, repr=False)
    _ended: concurrent.futures.Future[None] | None = attrs.field(default=None, repr=False)
    _closing: anyio.Event = attrs.field(factory=anyio.Event, repr=False)
    _calls: set[anyio.CancelScope] = attrs.field(factory=set, repr=False)

    @classmethod
    async def open(cls, server: ServerOptions) -> McpSession:
        """Start the server, or connect to it, and initialize the protocol.

        Raises:
            SessionOver: the server does not start, does not answer within ``open_seconds``, or does not speak MCP.
        """
        session = cls(server, _SESSIONS.enter())
        try:
            ready: concurrent.futures.Future[None] = concurrent.futures.Future()
            session._ended = session._portal.start_task_soon(session._run, ready)
            await asyncio.wrap_future(ready)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await session.close()
            raise
        return session

    @property
    def over(self) -> bool:
        """Whether the session has ended or is closing."""
        return self._ended is None or self._ended.done() or self._closing.is_set()

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; returns the SDK's ``CallToolResult``.

        Raises:
            SessionOver: the server is gone.
            ToolRefused: a protocol error, or no answer within ``call_seconds``.
        """
        return await self._submit(lambda: self._call_tool(tool, arguments))

    async def tools(self) -> list[Any]:
        """All tools that the server lists, as objects of the SDK."""

        async def pages() -> list[Any]:
            assert self._client is not None
            tools: list[Any] = []
            cursor = None
            while True:
                page = await self._client.list_tools(cursor)
                tools += page.tools
                cursor = page.nextCursor
                if not cursor:
                    return tools

        listing: list[Any] = await self._submit(pages)
        return listing

    async def close(self) -> None:
        """End the session and wait until the server's process is gone. Idempotent."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        try:
            if not ended.done():
                self._portal.start_task_soon(self._closing.set)
            with contextlib.suppress(Exception):
                await asyncio.wrap_future(ended)  # a cancellation of the caller cancels the session's task
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_SESSIONS.leave)

    # -- in the thread of the sessions --

    async def _run(self, ready: concurrent.futures.Future[None]) -> None:
        """Open the session, wait for its end, and close it, all in one task."""
        with _error_output() as errors:
            try:
                with anyio.CancelScope(deadline=anyio.current_time() + self.server.open_seconds) as opening:
                    async with contextlib.AsyncExitStack() as stack:
                        self._client = await self._connected(stack, errors)
                        await self._client.initialize()
                        opening.deadline = math.inf
                        ready.set_result(None)
                        await self._closing.wait()
                if opening.cancelled_caught and not ready.done():
                    late = f"did not answer within {self.server.open_seconds:g} s{_stderr_tail(errors)}"
                    ready.set_exception(SessionOver(f"MCP server {self.server.name!r} {late}"))
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - passed to the waiting caller
                if not ready.done():
                    why = f"did not start: {_innermost(error)}{_stderr_tail(errors)}"
                    over = SessionOver(f"MCP server {self.server.name!r} {why}")
                    over.__cause__ = error
                    ready.set_exception(over)
            finally:
                self._client = None
                self._closing.set()
                if not ready.done():
                    ready.set_exception(SessionOver(f"MCP server {self.server.name!r}: the session was cancelled"))
                for scope in self._calls:
                    scope.cancel()

    async def _connected(self, stack: contextlib.AsyncExitStack, errors: TextIO) -> Any:
        sdk = _sdk()
        read, write = await stack.enter_async_context(_transport(self.server, errors))
        send, receive = anyio.create_memory_object_stream[Any](0)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)

        async def relay() -> None:
            """Detect the server's end by the end of its stream: the SDK's session does not report it."""
            async with send, read:
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    async for message in read:
                        await send.send(message)
                self._closing.set()

        client: Any = await stack.enter_async_context(sdk.ClientSession(receive, write))
        tasks.start_soon(relay)
        return client

    async def _call_tool(self, tool: str, arguments: dict[str, Any]) -> Any:
        assert self._client is not None
        sdk = _sdk()
        try:
            return await self._client.call_tool(tool, arguments, datetime.timedelta(seconds=self.server.call_seconds))
        except sdk.McpError as error:
            if error.error.code == _TIMED_OUT:
                await self._check_alive()
            raise

    async def _check_alive(self) -> None:
        """Raise if the server does not answer a ping after a timeout: the SDK may not have noticed its end."""
        assert self._client is not None
        with anyio.move_on_after(_PING_SECONDS) as waited:
            await self._client.send_ping()
        if waited.cancelled_caught:
            self._closing.set()
            raise ConnectionError(f"no answer within {self.server.call_seconds:g} s, and none to a ping")

    async def _submit(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run ``work`` in the thread of the sessions; the end of the session cancels it."""
        if self.over:
            raise SessionOver(f"the session with MCP server {self.server.name!r} is over")
        return await asyncio.wrap_future(self._portal.start_task_soon(self._run_cancellable, work))

    async def _run_cancellable(self, work: Callable[[], Awaitable[Any]]) -> Any:
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                if self._client is not None:
                    return await work()
            except Exception as error:
                raise self._classified(error) from error
            finally:
                self._calls.discard(scope)
        raise SessionOver(f"MCP server {self.server.name!r} ended during a call")

    def _classified(self, error: Exception) -> Exception:
        """The error for the caller; one of the SDK about a single answer, e.g. a malformed one, ends no session."""
        code = getattr(getattr(error, "error", None), "code", None)
        if code in _OVER or isinstance(error, _STREAM_ERRORS):
            self._closing.set()
            why = f" ended during a call: {error}" if code in _OVER else f": {_innermost(error)}"
            return SessionOver(f"MCP server {self.server.name!r}{why}")
        if code == _TIMED_OUT:
            return ToolRefused(f"no answer within {self.server.call_seconds:g} s")
        return ToolRefused(str(error))


_OVER = (-32000, 32600)
"""Codes that the SDK itself creates: the connection is closed; the server no longer knows the HTTP session."""
_STREAM_ERRORS = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)
_TIMED_OUT = 408


def list_tools(server: ServerOptions) -> list[Any]:
    """List the tools of a server in a separate session; blocks until the server answers.

    Raises:
        SessionOver: the server does not start or does not answer.
        ToolRefused: the server answers with an error.
    """

    async def list_in_session() -> list[Any]:
        session = await McpSession.open(server)
        try:
            with anyio.fail_after(server.open_seconds):
                return await session.tools()
        except TimeoutError:
            raise SessionOver(f"MCP server {server.name!r} lists no tools within {server.open_seconds:g} s") from None
        finally:
            with anyio.CancelScope(shield=True):
                await session.close()

    with start_blocking_portal(name="mcp tools") as portal:
        return portal.call(list_in_session)


def _sdk() -> Any:
    """Import the official SDK.

    Raises:
        ConfigError: the SDK is not installed.
    """
    try:
        import mcp
    except ImportError as error:
        raise ConfigError(f"MCP servers need the package mcp ({install_command('mcp')}): {error}") from error
    return mcp


@contextlib.asynccontextmanager
async def _transport(server: ServerOptions, errors: TextIO) -> Any:
    if server.command:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        command, *arguments = server.command
        env = None if server.env is None else dict(server.env)
        parameters = StdioServerParameters(
            command=command, args=arguments, env=env, cwd=None if server.cwd is None else str(server.cwd)
        )
        async with stdio_client(parameters, errors) as streams:
            yield streams
    else:
        import httpx
        from mcp.client.streamable_http import streamable_http_client

        waits = httpx.Timeout(server.open_seconds, read=max(server.call_seconds, server.open_seconds))
        assert server.url is not None
        async with httpx.AsyncClient(headers=dict(server.headers), timeout=waits) as client:
            async with streamable_http_client(server.url, http_client=client) as (read, write, _):
                yield read, write


@contextlib.contextmanager
def _error_output() -> Iterator[TextIO]:
    """A temporary file for the server's standard error, which failure messages quote."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        yield cast(TextIO, errors)


def _stderr_tail(errors: TextIO) -> str:
    errors.seek(0)
    text = errors.read().strip()[-_ERROR_TAIL:]
    return f"; its stderr: {text}" if text else ""


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {shortened(str(error))}"
