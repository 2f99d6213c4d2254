"""Helpers for tests of the gateway: a session with scripted replies, and replies of every form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import anyio
import attrs
import msgspec

from rollouts.dtypes import Message, ToolCall
from rollouts.programs.gateway.types import CallReply, CallRequest, Usage

__all__ = ["BAD", "CALL", "REPLIES", "ScriptedSession", "data_of", "named_events", "reply_of"]

CALL = ToolCall("bash", {"command": "ls"}, id="c00000001")
OTHER = ToolCall("read", {"path": "a\u2028b"}, id="c00000002")
BAD = ToolCall("bash", {}, id="c00000003", raw="{bad", error="no JSON", fault="not_json")


def reply_of(
    message: Message | str, number: int = 1, finish: Literal["stop", "length"] = "stop", stop: str | None = None
) -> CallReply:
    """A reply with this message."""
    message = Message("assistant", message) if isinstance(message, str) else message
    reason: Any = "tool_calls" if message.tool_calls and finish == "stop" else finish
    usage = Usage(prompt_tokens=100, completion_tokens=20, cached_tokens=60, reasoning_tokens=5)
    return CallReply(f"r{number}", message, reason, usage, stop_text=stop, created=1700000000)


REPLIES = {
    "text": reply_of("Hello."),
    "empty": reply_of(""),
    "thought": reply_of(Message("assistant", "Hello.", reasoning="Hm.")),
    "only a thought": reply_of(Message("assistant", "", reasoning="Hm.")),
    "call": reply_of(Message("assistant", "", [CALL])),
    "everything": reply_of(Message("assistant", "I look.", [CALL, OTHER], reasoning="Hm.")),
    "malformed call": reply_of(Message("assistant", "I look.", [BAD])),
    "cut": reply_of("Hel", finish="length"),
    "stopped": reply_of("Hel", stop="lo"),
    "line ends": reply_of("a\u2028b\u2029c\u0085d\ne\r\nf"),
    "half a pair": reply_of(Message("assistant", "", [ToolCall("bash", {"command": "\ud800"}, id="c00000004")])),
}
"""Replies of every form."""

Step = CallReply | Message | str | Exception | Callable[[CallRequest], Awaitable[Message | str]]


@attrs.define(eq=False)
class ScriptedSession:
    """A session that gives the replies of a script, in order, and records what the server asks."""

    script: Iterator[Step] = attrs.field(default=(), converter=iter)
    key: str = "key-of-a-test-0001"
    ended: bool = False
    max_body: int = 1 << 26
    no_images: str = ""
    requests: list[CallRequest] = attrs.field(factory=list)
    lineages: list[Mapping[str, str]] = attrs.field(factory=list)
    attempts: list[int] = attrs.field(factory=list)
    replies: list[CallReply] = attrs.field(factory=list)
    received: list[str] = attrs.field(factory=list)
    """The ids of the replies that were delivered."""
    lost: list[str] = attrs.field(factory=list)
    """The ids of the replies whose client went away."""
    gone: int = 0
    """Calls that were cancelled."""
    counts: Counter[str] = attrs.field(factory=Counter)
    failures: list[Exception] = attrs.field(factory=list)
    changed: anyio.Event = attrs.field(factory=anyio.Event)

    async def call(self, request: CallRequest, *, lineage: Mapping[str, str], attempt: int = 0) -> Sequence[CallReply]:
        self.requests.append(request)
        self.lineages.append(lineage)
        self.attempts.append(attempt)
        self._change()
        try:
            return [await self._next(request) for _ in range(request.n)]
        except anyio.get_cancelled_exc_class():
            self.gone += 1
            self._change()
            raise

    async def _next(self, request: CallRequest) -> CallReply:
        step = next(self.script)
        if callable(step):
            step = await step(request)
        if isinstance(step, Exception):
            raise step
        reply = step if isinstance(step, CallReply) else reply_of(step)
        self.replies.append(attrs.evolve(reply, id=f"r{len(self.replies) + 1}"))
        return self.replies[-1]

    def delivered(self, replies: Sequence[CallReply]) -> None:
        self.received += [reply.id for reply in replies]
        self._change()

    def undelivered(self, replies: Sequence[CallReply]) -> None:
        self.lost += [reply.id for reply in replies]
        self._change()

    def reply(self, reply_id: str) -> CallReply | None:
        return next((reply for reply in self.replies if reply.id == reply_id), None)

    async def count_tokens(self, request: CallRequest) -> int:
        return sum(len(message.content) for message in request.messages)

    def count(self, name: str, amount: float = 1) -> None:
        self.counts[name] += int(amount)

    def fail(self, error: Exception) -> None:
        self.failures.append(error)

    def _change(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on what is recorded."""
        with anyio.fail_after(10):
            while not condition():
                await self.changed.wait()


def named_events(stream: bytes) -> list[tuple[str, Any]]:
    """The (name, data) of each event of a stream; comments are left out. No name is ``""``."""
    assert stream.endswith(b"\n\n")
    found = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        fields = [line.partition(": ") for line in block.splitlines()]
        assert all(colon for _, colon, _ in fields), f"a line that is no field: {block!r}"
        named = {name: value for name, _, value in fields if name}
        if named:
            text = named["data"]
            found.append((named.get("event", ""), text if text == "[DONE]" else msgspec.json.decode(text)))
    return found


def data_of(stream: bytes) -> list[Any]:
    """The data of each event of a stream."""
    return [data for _, data in named_events(stream)]
