"""The requests of one session that are under way, and the calls that wait for their replies.

Invariant: a reply is given to one call, and to retries of that call. A request is a retry if an equal one has lost its
client and no other retry has taken its reply, or if its header says so and it can repeat only one request. A
generation whose clients have gone is aborted if no retry comes.

This module knows no model and no limit of a session.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

import anyio
import attrs
from anyio.abc import TaskGroup

from rollouts.concurrency.deadlines import scope_class
from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Message, Tool
from rollouts.programs.gateway.normal import Conversation, EchoChange
from rollouts.programs.gateway.tree import Call, Tree
from rollouts.programs.gateway.types import CallReply, CallRequest

__all__ = ["OpenRequest", "OpenRequests"]


@attrs.define(eq=False)
class OpenRequest:
    """One request under way, with all calls that wait for its replies."""

    sent: CallRequest
    conversation: Conversation
    tools: tuple[Tool, ...]
    tools_key: bytes
    lineage: Mapping[str, str]
    by_hand: bool
    attempt: int
    """How often the client of its latest call had sent it before."""
    retry_key: object = attrs.field(init=False)
    """Equal in requests that are the same request again."""
    numbered: bool = False
    """Whether its calls have their numbers."""
    waiting: int = 0
    scope: anyio.CancelScope = attrs.field(factory=lambda: scope_class()())
    done: anyio.Event = attrs.field(factory=anyio.Event)
    calls: list[Call] = attrs.field(factory=list)
    changes: Mapping[EchoChange, int] = attrs.field(factory=dict)
    """The changes of the program in the replies that its request has."""
    renamed: int = 0
    """The number of these replies that came with other ids of calls."""
    error: Exception | None = None

    def __attrs_post_init__(self) -> None:
        sent, keys = self.sent, self.conversation.keys
        shown = sent.continues, sent.constraint, sent.logprobs, sent.token_ids, sent.strict, sent.call_prefix
        shape = (sent.max_tokens, sent.stop, sent.n, repr(sent.sampling) if sent.sampling else "", shown)
        self.retry_key = (tuple(sorted(self.lineage.items())), self.tools_key, keys[-1] if keys else 0, shape)

    @property
    def missing(self) -> int:
        """The number of replies that it does not have."""
        return self.sent.n - len(self.calls)

    def new_messages(self, *, of_root: bool) -> tuple[tuple[Message, ...], str | None]:
        """The messages that the program sent behind the last reply, and the instructions among them."""
        whole = self.conversation.whole
        if of_root:
            return whole, self.sent.instructions
        last, _ = self.conversation.replies[-1]
        return whole[last + 1 :], None


class OpenRequests:
    """The requests of one session that are under way; an async context manager, which owns their tasks.

    Args:
        tree: keeps the replies of clients that have gone.
        retry_seconds: how long a generation continues without a client.
    """

    def __init__(self, tree: Tree, retry_seconds: float) -> None:
        self._tree = tree
        self._retry_seconds = retry_seconds
        self._open: list[OpenRequest] = []
        self._group: contextlib.AbstractAsyncContextManager[TaskGroup] = first_error()
        self._tasks: TaskGroup | None = None
        self._of_rollout = contextvars.Context()

    def __len__(self) -> int:
        return len(self._open)

    async def __aenter__(self) -> Self:
        self._tasks = await self._group.__aenter__()
        self._of_rollout = contextvars.copy_context()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._group.__aexit__(kind, error, trace)

    @property
    def unnumbered(self) -> int:
        """The calls that are to get a number."""
        return sum(one.sent.n for one in self._open if not one.numbered)

    def abort(self) -> None:
        """Abort all generations."""
        for one in self._open:
            one.scope.cancel()

    def repeated(self, request: OpenRequest) -> OpenRequest | None:
        """The request under way that this one repeats: its client has gone, or no other request can be meant."""
        equal = [one for one in self._open if one.retry_key == request.retry_key and not one.scope.cancel_called]
        gone = next((one for one in equal if not one.waiting), None)
        if gone is None and len(equal) == 1 and equal[0].attempt < request.attempt:
            gone = equal[0]
        if gone is not None:
            gone.attempt = request.attempt
        return gone

    def start(self, request: OpenRequest, answer: Callable[[OpenRequest], Coroutine[Any, Any, None]]) -> None:
        """Start a task that answers a request; it ends with :meth:`finish`."""
        assert self._tasks is not None, "calls are made inside `async with session`"
        self._open.append(request)
        # In the context of the rollout, not of the connection: failures name it, and pauses stop its deadlines.
        self._of_rollout.run(self._tasks.start_soon, answer, request)

    def finish(self, request: OpenRequest) -> None:
        """Give the calls that wait for a request its replies or its error; without a call, keep the replies."""
        self._open.remove(request)
        if not request.waiting:
            self._keep(request)
        request.done.set()

    async def replies_of(self, request: OpenRequest) -> list[CallReply]:
        """Wait for the replies; without a call that waits for it, the generation is aborted a little later."""
        request.waiting += 1
        request.scope.deadline = math.inf
        try:
            await request.done.wait()
        except anyio.get_cancelled_exc_class():
            if request.done.is_set():
                self._keep(request)
            raise
        finally:
            request.waiting -= 1
            if not request.waiting and not request.done.is_set():
                request.scope.deadline = anyio.current_time() + self._retry_seconds
        if request.error is not None:
            raise request.error
        return [call.reply for call in request.calls]

    def _keep(self, request: OpenRequest) -> None:
        """Keep the replies for a retry: their clients have gone."""
        for call in request.calls:
            self._tree.not_delivered(call)
