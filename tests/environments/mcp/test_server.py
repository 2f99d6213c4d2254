"""Sessions are given back when an episode ends, also where one of them does not close."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from rollouts.dtypes import Prompt, Tool
from rollouts.environments.mcp import McpEnvironment, McpServer
from rollouts.environments.mcp.session import McpSession, SessionOver, ToolRefused


class Broken:
    """A server whose sessions do not close."""

    name = "broken"
    tools = (Tool("one", "One."),)

    async def take(self) -> Any:
        return "session"

    async def give_back(self, session: Any) -> None:
        raise OSError("planted")


class Counted:
    """A server that counts its sessions."""

    name = "counted"
    tools = (Tool("two", "Two."),)
    sessions = 0

    async def take(self) -> Any:
        self.sessions += 1
        return "session"

    async def give_back(self, session: Any) -> None:
        self.sessions -= 1


async def test_a_session_that_does_not_close_leaves_no_other_open() -> None:
    """The session of each server is given back; the failure is that of the environment's close."""
    servers: list[Any] = [Counted(), Broken(), Counted()]
    servers[2].tools = (Tool("three", "Three."),)
    environment = McpEnvironment(*servers)
    await environment.start(Prompt("Well?"))
    with pytest.raises(OSError, match="planted"):
        await environment.close()
    assert (servers[0].sessions, servers[2].sessions) == (0, 0)


class Closed:
    """A session that notes its end."""

    over = closed = False

    async def close(self) -> None:
        self.closed = True


async def test_a_user_that_is_cancelled_gives_its_shared_session_back() -> None:
    """It waits while another episode takes the session; the last user closes the session all the same."""
    session: Any = Closed()
    server = McpServer(command=("true",), shared=True)
    server._session = session
    for _ in range(2):
        assert await server.take() is session
    taken = anyio.Event()

    async def take_slowly(*, task_status: Any) -> None:
        async with server._opening:
            task_status.started()
            await taken.wait()

    async with anyio.create_task_group() as tasks:
        await tasks.start(take_slowly)
        with anyio.move_on_after(0) as late:
            await server.give_back(session)
        taken.set()
    assert late.cancelled_caught
    assert not session.closed
    await server.give_back(session)
    assert session.closed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("1 validation error for CallToolResult"), ToolRefused),
        (RuntimeError("Invalid structured content returned by tool add"), ToolRefused),
        (KeyError("isError"), ToolRefused),
        (anyio.ClosedResourceError(), SessionOver),
        (anyio.BrokenResourceError(), SessionOver),
        (anyio.EndOfStream(), SessionOver),
        (ConnectionError("no answer within 1 s, and none to a ping"), SessionOver),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_only_the_end_of_its_streams_ends_a_session(error: Exception, kind: type[Exception]) -> None:
    """An answer that the SDK cannot read costs its call: the episode keeps its session."""
    server: Any = McpServer(command=("true",))
    session: Any = McpSession(server, portal=None)
    session._client = object()

    async def fails() -> None:
        raise error

    with pytest.raises(kind):
        await session._run_cancellable(fails)
    assert session._closing.is_set() is (kind is SessionOver)
