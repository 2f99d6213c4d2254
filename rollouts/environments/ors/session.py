"""One session on an ORS server, from its creation to its deletion.

Invariant: :meth:`ORSSession.close` deletes the session, also after a cancelled creation. Until then it is kept alive,
however long the model takes. A call runs once; if that is not certain, it raises.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.dtypes import Message
from rollouts.environments.ors.connection import Connection
from rollouts.environments.ors.keepalive import KeepAlive, Listed
from rollouts.environments.ors.wire import (
    Block,
    CallAnswer,
    Events,
    Listing,
    ORSError,
    ScoreAnswer,
    content_of,
    messages_of,
    read,
)

__all__ = ["ORSSession", "create_session_id", "delete_session_id"]

_KEEP_ALIVE = KeepAlive()


async def create_session_id(connection: Connection) -> str:
    """Return a new session id: random, or created by the cloud."""
    if not connection.has_key:
        return uuid.uuid4().hex
    events = Events().feed(await connection.request("POST", "/create_session", {}))
    session_id = next((text.strip() for event, text in events if event == "task_id"), None)
    if not session_id:
        raise ORSError("POST /create_session: the response has no session id")
    return session_id


async def delete_session_id(connection: Connection, session_id: str) -> None:
    """Delete a session id that a cloud created."""
    if connection.has_key:
        await connection.request("POST", "/delete_session", session_id=session_id)


class ORSSession:
    """One session.

    Args:
        connection: to the server.
        environment: the environment's name.
        ping_seconds: interval of keep-alive pings.
    """

    def __init__(self, connection: Connection, environment: str, ping_seconds: float) -> None:
        self.environment = environment
        self._connection = connection
        self._ping_seconds = ping_seconds
        self._id: str | None = None
        self._listed: Listed | None = None

    def __repr__(self) -> str:
        return f"<ORSSession {self._id} over {self._connection!r}>"

    async def create(self, task: Mapping[str, Any]) -> None:
        """Create the environment for a task (fields of the wire format). Its setup continues on the server."""
        connection = self._connection
        self._id = session_id = await create_session_id(connection)
        body = {"env_name": self.environment, **task}
        await connection.request("POST", "/create", body, session_id=session_id, done=400)
        self._listed = Listed(f"{connection.url}/ping", connection.headers(session_id), self._ping_seconds)
        _KEEP_ALIVE.add(self._listed)

    async def listing(self) -> Listing:
        """The tools of the environment and of this task."""
        return read(Listing, await self._get("/task_tools"), "tools")

    async def opening(self, listing: Listing, *, images: bool = False) -> tuple[list[Message], int]:
        """The messages of the prompt, and the number of its blocks that the model does not see."""
        if listing.message_block_types is not None:
            return messages_of(await self._get("/messages"), "messages", images=images)
        content, hidden = content_of(read(list[Block], await self._get("/prompt"), "prompt"), images=images)
        return [Message("user", content)], hidden

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallAnswer:
        """Run a tool once.

        Raises:
            ORSError: the tool raised, or its outcome is unknown.
        """
        what = f"tool {name!r}"
        try:
            text = await self._stream("/call", {"name": name, "input": dict(arguments)})
        except ORSError as error:
            raise ORSError(f"{what}: {error}", status=error.status) from error
        return read(CallAnswer, text, what)

    async def score_group(self, candidates: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
        """Return a reward for each candidate (messages of the standard); the environment compares them.

        Raises:
            ORSError: scoring failed, is not supported, or returned the wrong number of scores.
        """
        body = {"candidates": [{"messages": list(messages)} for messages in candidates]}
        text = await self._stream("/score_group", body)
        scores = [score.reward for score in read(ScoreAnswer, text, "score_group").scores]
        if len(scores) != len(candidates):
            raise ORSError(f"score_group: got {len(scores)} scores; expected {len(candidates)}")
        return scores

    async def close(self) -> None:
        """Delete the environment."""
        if self._listed is not None:
            _KEEP_ALIVE.discard(self._listed)
        if self._id is not None:
            session_id, self._id = self._id, None
            try:
                await self._connection.request("POST", "/delete", session_id=session_id)
            finally:
                await delete_session_id(self._connection, session_id)

    async def _get(self, path: str) -> bytes:
        self._mark_active()
        return await self._connection.request("GET", f"/{self.environment}{path}", session_id=self._id)

    async def _stream(self, path: str, body: dict[str, Any]) -> str:
        self._mark_active()
        assert self._id is not None, "the session is not created or is closed"
        return await self._connection.stream(f"/{self.environment}{path}", body, self._id)

    def _mark_active(self) -> None:
        if self._listed is not None:
            self._listed.heard = time.monotonic()
