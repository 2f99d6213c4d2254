"""One environment on an ORS server, from its creation to its deletion.

Invariant: it is deleted by whoever made it, also where its creation was given up half way; until then its server hears
of it, however long the model thinks. A call runs once, or nobody knows and that is an error.
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
    messages_of,
    read,
    text_of,
)

__all__ = ["ORSSession", "forget", "new_session_id"]

_KEEP_ALIVE = KeepAlive()


async def new_session_id(connection: Connection) -> str:
    """The number of a new session: ours, or in a cloud the server's."""
    if not connection.has_key:
        return uuid.uuid4().hex
    events = Events().feed(await connection.ask("POST", "/create_session", {}))
    number = next((text.strip() for event, text in events if event == "task_id"), None)
    if not number:
        raise ORSError("POST /create_session: no session number came")
    return number


async def forget(connection: Connection, number: str) -> None:
    """Give a cloud's session number back."""
    if connection.has_key:
        await connection.ask("POST", "/delete_session", session=number)


class ORSSession:
    """One session.

    Args:
        connection: to the server.
        environment: which of its environments.
        ping_seconds: how often it gives a sign of life.
    """

    def __init__(self, connection: Connection, environment: str, ping_seconds: float) -> None:
        self.environment = environment
        self._connection = connection
        self._ping_seconds = ping_seconds
        self._number: str | None = None
        self._listed: Listed | None = None

    def __repr__(self) -> str:
        return f"<ORSSession {self._number} over {self._connection!r}>"

    async def create(self, task: Mapping[str, Any]) -> None:
        """Make the environment for a task, as fields of the wire; its setup goes on when this returns."""
        connection = self._connection
        self._number = number = await new_session_id(connection)
        body = {"env_name": self.environment, **task}
        await connection.ask("POST", "/create", body, session=number, done=400)
        self._listed = Listed(f"{connection.url}/ping", connection.headers(number), self._ping_seconds)
        _KEEP_ALIVE.add(self._listed)

    async def listing(self) -> Listing:
        """The tools, those of this task among them."""
        return read(Listing, await self._ask("/task_tools"), "tools")

    async def opening(self, listing: Listing) -> tuple[list[Message], int]:
        """The messages of the prompt, and how many blocks in it cannot be shown."""
        if listing.message_block_types is not None:
            return messages_of(await self._ask("/messages"), "messages")
        text, hidden = text_of(read(list[Block], await self._ask("/prompt"), "prompt"))
        return [Message("user", text)], hidden

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallAnswer:
        """Run a tool once.

        Raises:
            ORSError: the tool raised, or nobody knows what became of it.
        """
        what = f"tool {name!r}"
        try:
            text = await self._stream("/call", {"name": name, "input": dict(arguments)})
        except ORSError as error:
            raise ORSError(f"{what}: {error}", status=error.status) from error
        return read(CallAnswer, text, what)

    async def score_group(self, candidates: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
        """A reward for each candidate, given as messages of the standard; the environment compares them.

        Raises:
            ORSError: it cannot, it failed, or the number of scores is another.
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
        if self._number is not None:
            number, self._number = self._number, None
            try:
                await self._connection.ask("POST", "/delete", session=number)
            finally:
                await forget(self._connection, number)

    async def _ask(self, path: str) -> bytes:
        self._alive()
        return await self._connection.ask("GET", f"/{self.environment}{path}", session=self._number)

    async def _stream(self, path: str, body: dict[str, Any]) -> str:
        self._alive()
        assert self._number is not None, "a session is used between its creation and its end"
        return await self._connection.stream(f"/{self.environment}{path}", body, self._number)

    def _alive(self) -> None:
        if self._listed is not None:
            self._listed.heard = time.monotonic()
