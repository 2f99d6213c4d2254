"""One session: the calls of one program, answered with exact token ids.

A call takes these steps: match, render, complete, parse, add to the tree. Its laws are those of
:mod:`rollouts.programs.gateway.tree`, and one more, Said: a field that is not honoured is a count in
:attr:`ProgramSession.counts`.

Invariant: a reply is given to one call, and to retries of that call. A request is a retry if an equal one has lost its
client and no other retry has taken its reply, or if its header says so and there is only one that it can repeat. A
generation whose clients have gone is aborted if no retry comes. After the end of the session no call begins.

This module knows no wire format and no HTTP; it knows the policy and the renderer.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import attrs
from anyio.abc import TaskGroup

from rollouts.base.validators import integer, seconds
from rollouts.concurrency.deadlines import deadline
from rollouts.concurrency.task_groups import first_error
from rollouts.concurrency.times import now
from rollouts.dtypes import (
    Completion,
    ImageSpan,
    Message,
    OnRewrite,
    SamplingParams,
    StopReason,
    TokenColumn,
    Tool,
    ToolCall,
)
from rollouts.errors import (
    ConfigError,
    ContextOverflow,
    EndpointAway,
    EndpointError,
    Failure,
    GenerateFailure,
    HistoryRewritten,
)
from rollouts.inference.base import CompletionRequest, Policy, check_takes_images
from rollouts.programs.gateway.call_ids import CallIds
from rollouts.programs.gateway.in_flight import InFlight
from rollouts.programs.gateway.normal import (
    Conversation,
    Conversations,
    EchoChange,
    MessageRules,
    echo_changes,
    message_rules,
    with_tool_names,
)
from rollouts.programs.gateway.tool_sets import ToolSets
from rollouts.programs.gateway.tree import Call, Line, Match, Training, Tree
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest, Usage
from rollouts.renderer import Renderer
from rollouts.renderer.dialects import thought_marks
from rollouts.renderer.in_threads import bridged, in_thread, rendered
from rollouts.trajectory import Trajectory

__all__ = ["ProgramSession", "SessionLimits"]

_PROMPT_END = 16
"""Number of last prompt tokens that show whether the prompt opened a thinking block."""
_MOST_STOPS = 32
"""Stop strings that servers accept."""
_MOST_COUNTS = 256
"""Names of counts of one session; what is beyond is one count, for a program may send any name of a tool's type."""
_REWRITES_KEPT = 8
_MOST_BODY = 1 << 26
_LEAST_BODY = 1 << 22
_BYTES_OF_TOKEN = 256
"""Of a request: a token of text is some 4 bytes, 6 times that where each is escaped, and white space is longer."""
_RULES: weakref.WeakKeyDictionary[Renderer, MessageRules] = weakref.WeakKeyDictionary()
"""The rules of the chat templates in use: sessions share a renderer."""
_NO_EFFECT: Mapping[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
"""The values of the parameters that a run does not have."""


@attrs.frozen
class SessionLimits:
    """When a session ends, and how much it does at a time."""

    max_calls: int | None = attrs.field(default=1000, validator=integer(1, optional=True))
    """Calls that are sampled."""
    max_roots: int | None = attrs.field(default=256, validator=integer(1, optional=True))
    """Conversations that go on from none before. One more fails the session: either the program starts agents without
    end, or it rewrites its history at every turn."""
    max_sampled_tokens: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Sampled tokens of all calls together."""
    max_tokens_in_flight: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Tokens of the prompts and budgets that are at the policy at the same time; further calls wait. A single call that
    has more is sent alone."""
    max_seconds: float = attrs.field(default=3600.0, validator=seconds(above=0))
    """Wall time of the session."""


@attrs.define(eq=False)
class _Work:
    """One request under way, with all calls that wait for its replies."""

    request: CallRequest
    conversation: Conversation
    tools: tuple[Tool, ...]
    tools_key: bytes
    retry_key: object
    lineage: Mapping[str, str]
    by_hand: bool
    attempt: int
    """How often its client had sent it before; of the calls that wait, the last."""
    numbered: bool = False
    """Whether the session has numbered its calls."""
    waiting: int = 0
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    done: anyio.Event = attrs.field(factory=anyio.Event)
    calls: list[Call] = attrs.field(factory=list)
    changes: list[EchoChange] = attrs.field(factory=list)
    """What the program changed in the reply that it goes on from."""
    error: Exception | None = None

    def asked(self, *, of_root: bool) -> tuple[tuple[Message, ...], str | None]:
        """What the program sent behind the last reply, and the instructions among it."""
        whole = self.conversation.whole
        if of_root:
            return whole, self.request.instructions
        last, _ = self.conversation.replies[-1]
        return whole[last + 1 :], None


class ProgramSession:
    """The session of one program; used as an async context manager, which owns its generations.

    Args:
        policy: samples the replies.
        renderer: converts messages to tokens and back.
        sampling: parameters of each request; those of a program are not used. ``max_new_tokens`` is the most that one
            reply has. A ``seed`` is mixed with the name of the session and the number of the call.
        key: the secret of the session; random by default.
        name: of the rollout, for seeds.
        max_context: context length of the model in tokens, prompt and reply together; ``None``: unlimited.
        limits: when the session ends.
        training: which replies are trained.
        history: what to do where a program sends a reply back otherwise than it was given it, with the same call ids:
            ``"append"`` goes on from the kept ids, ``"fork"`` opens a root that shows the reply as the program does,
            ``"error"`` fails the session.
        retry_seconds: how long a generation continues without a client, for a retry of its call. SDKs wait up to 8 s.

    Attributes:
        tree: the calls.
        counts: what happened, and what was not honoured, by name.
        rewrites: of the first roots that share a beginning with an earlier conversation: the number of the message that
            differs, and its text.
        stop_reason: why the session ended; ``None`` while it takes calls.
        over: set when the session has ended.
        overflowed: whether the last call did not fit the context of the model.
    """

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        sampling: SamplingParams,
        *,
        key: str | None = None,
        name: str = "",
        max_context: int | None = None,
        limits: SessionLimits | None = None,
        training: Training | None = None,
        history: OnRewrite = "append",
        retry_seconds: float = 10.0,
    ) -> None:
        self.key = os.urandom(16).hex() if key is None else key
        self.name = name
        self.tree = Tree()
        self.counts: Counter[str] = Counter()
        self.rewrites: list[tuple[int, str]] = []
        self.stop_reason: StopReason | None = None
        self.failure: Failure | None = None
        self.over = anyio.Event()
        self.overflowed = False
        self._denied: dict[object, Failure] = {}
        """Requests that the model's server failed to answer, and that have no reply since."""
        self._of_rollout = contextvars.Context()
        self._policy = policy
        self._renderer = renderer
        self._sampling = sampling
        self._max_context = max_context
        self._limits = limits or SessionLimits()
        self._training = training or Training()
        self._history: OnRewrite = history
        self._route = os.urandom(16).hex()  # not the key: servers write routes to their logs
        self._ends = time.monotonic() + self._limits.max_seconds
        self._error: Exception | None = None
        self._retry_seconds = retry_seconds
        self._works: list[_Work] = []
        self._group: contextlib.AbstractAsyncContextManager[TaskGroup] | None = None
        self._tasks: TaskGroup | None = None
        self._latest: Conversations | None = None
        self._tools = ToolSets(renderer)
        self._ids = CallIds()
        self._in_flight = InFlight(self._limits.max_tokens_in_flight)
        self._calls = 0
        self._names_agents = False
        """Whether the first request had a lineage."""

    def __repr__(self) -> str:
        state = self.stop_reason or f"{len(self._works)} requests under way"
        return f"<ProgramSession {self.name} {self.tree!r}, {state}>"

    async def __aenter__(self) -> Self:
        self._group = first_error()
        self._tasks = await self._group.__aenter__()
        self._of_rollout = contextvars.copy_context()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None, "entered before"
        self.end()
        return await self._group.__aexit__(kind, error, trace)

    # -- the server's side --------------------------------------------------------------------------------------------

    @property
    def denied(self) -> Failure | None:
        """The failure of a call that the model's server did not answer, and that was not repeated with success."""
        return next(iter(self._denied.values()), None)

    @property
    def max_body(self) -> int:
        """The most bytes of a request: a longer one would not fit the context, unless it is of images."""
        if self._max_context is None or self._renderer.images is not None:
            return _MOST_BODY
        return min(max(self._max_context * _BYTES_OF_TOKEN, _LEAST_BODY), _MOST_BODY)

    @property
    def no_images(self) -> str:
        """Why the model takes no images; empty if it does."""
        if self._renderer.images is None:
            return f"got an image; expected text: the renderer of chat template {self._renderer.name} has no images"
        try:
            check_takes_images(self._policy)
        except ConfigError as error:
            return str(error)
        return ""

    @property
    def ended(self) -> bool:
        """Whether the session takes no more calls."""
        return self.stop_reason is not None

    def end(self, stop_reason: StopReason = StopReason.TASK_COMPLETED, failure: Failure | None = None) -> None:
        """End the session: its generations are aborted, and later calls are refused. The first reason counts."""
        if self.stop_reason is None:
            self.stop_reason, self.failure = stop_reason, failure
            self.over.set()
            for work in self._works:
                work.scope.cancel()

    def fail(self, error: Exception) -> None:
        """End the session with an error of the gateway itself, which :meth:`branches` raises."""
        self._error = self._error or error
        self.end(StopReason.FAILED, Failure.of(error))

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a count of the session."""
        self.counts[name] += amount  # type: ignore[assignment]  # counts of amounts that are no integers

    def reply(self, reply_id: str) -> CallReply | None:
        """An earlier reply by its id."""
        call = self.tree.call_of(reply_id)
        return None if call is None else call.reply

    def delivered(self, replies: Sequence[CallReply]) -> None:
        """Note that the program got these replies: the same request again is a request for other replies."""
        for reply in replies:
            call = self.tree.call_of(reply.id)
            if call is not None:
                self.tree.delivered(call)

    def undelivered(self, replies: Sequence[CallReply]) -> None:
        """Note that the client of these replies went away: the same request again is a retry, and gets them."""
        for reply in replies:
            call = self.tree.call_of(reply.id)
            if call is not None:
                self.tree.not_delivered(call)

    async def count_tokens(self, request: CallRequest) -> int:
        """Length in ids of an opening with these messages and tools."""
        conversation = self._conversations().of(request.messages, self.tree.ours)
        await self._check_images(conversation.new)
        opening, _ = await self._opening(self._to_render(conversation.messages), request.tools)
        return len(opening)

    async def call(self, request: CallRequest, *, lineage: Mapping[str, str], attempt: int = 0) -> list[CallReply]:
        """Return ``request.n`` replies of the model.

        Args:
            request: what the program asks.
            lineage: names of the agent or conversation; labels, and a part of what makes two requests the same.
            attempt: how often the client has sent this request before, as its header says.

        Raises:
            ApiError: the request is refused or cannot be answered; ``conflict`` if the session has ended.
            TokenMismatchError: a law was broken.
        """
        conversation = self._conversations().of(self._whole(request), self.tree.ours)
        await self._check_images(conversation.new)
        self._check_open()
        self._conversations().keep(conversation)
        for name, amount in request.counts.items():  # some names are from the request
            self.count(name if name in self.counts or len(self.counts) < _MOST_COUNTS else "other_counts", amount)
        for name, value in request.sampling.items():
            if name == "seed" or value != self._run_value(name):  # each call has a seed of its own
                self.count(f"sampling_overridden/{name}")
        work = self._work_of(request, conversation, dict(lineage), attempt)
        if (earlier := self._repeated(work)) is not None:
            self.count("retries_joined")
            return await self._replies_of(earlier)
        if kept := self.tree.take_kept(work.retry_key, request.n):
            self.count("retries_served")
            return [call.reply for call in kept]
        self._check_calls(request.n)
        assert self._tasks is not None, "calls are made inside `async with session`"
        self._works.append(work)
        # In the context of the rollout, not of the connection: failures name it, and pauses stop its deadlines.
        self._of_rollout.run(self._tasks.start_soon, self._run, work)
        return await self._replies_of(work)

    def branches(self) -> list[Trajectory]:
        """Return the sealed branches of an ended session; the last one has the counts.

        Raises:
            TokenMismatchError: a law is broken.
            ConfigError: the template or the dialect cannot serve the tools of the program.
            EndpointAway: no server answered for too long.
        """
        if self._error is not None:
            raise self._error
        reason = None if self.stop_reason is StopReason.TASK_COMPLETED else self.stop_reason
        branches = self.tree.branches(reason, self.failure, training=self._training, history=self._history)
        if branches:
            for name, amount in self.metrics().items():
                branches[-1].count(name, amount)
        return branches

    def metrics(self) -> dict[str, float]:
        """The counts, with the numbers of calls, roots and sampled ids, and of these the not trained ones by reason."""
        untrained = {f"untrained_tokens/{reason}": amount for reason, amount in self.tree.untrained.items()}
        tree = {"calls": len(self.tree.calls), "roots": len(self.tree.roots), "sampled_tokens": self.tree.sampled}
        return {**self.counts, **tree, **untrained}

    # -- one request --------------------------------------------------------------------------------------------------

    def _run_value(self, name: str) -> Any:
        """The sampling parameter of the run that replaces that of a request."""
        return getattr(self._sampling, name, _NO_EFFECT.get(name))

    def _check_open(self) -> None:
        most = self._limits.max_sampled_tokens
        if time.monotonic() > self._ends:
            self.end(StopReason.DEADLINE)
        if most is not None and self.tree.sampled >= most:
            self.end(StopReason.MAX_TOKENS)
        self._check_not_ended()

    def _check_calls(self, n: int) -> None:
        """End the session at one call too many; a retry is none."""
        most = self._limits.max_calls
        starting = sum(work.request.n for work in self._works if not work.numbered)
        if most is not None and self._calls + starting + n > most:
            self.end(StopReason.MAX_TURNS)
        self._check_not_ended()

    def _check_not_ended(self) -> None:
        if self.ended:
            raise ApiError("conflict", f"the session has ended: {self.stop_reason}")

    async def _check_images(self, messages: Sequence[Message]) -> None:
        """Refuse images that the model does not see."""
        if not any(message.images for message in messages):
            return
        try:
            self._renderer.check_images(messages)
            check_takes_images(self._policy)
            if self._renderer.images is not None:
                await in_thread(self._renderer.images.check_repeats)
        except ConfigError as error:
            self.count("refused/image")
            raise ApiError("invalid_request", f"messages: {error}") from None

    def _work_of(
        self, request: CallRequest, conversation: Conversation, lineage: dict[str, str], attempt: int
    ) -> _Work:
        if not self._calls and not self._works and lineage:
            self._names_agents = True
        named = self._tools.key(request.tools)
        shape = (request.max_tokens, request.stop, request.n, repr(request.sampling) if request.sampling else "")
        keys = conversation.keys
        retry_key = (tuple(sorted(lineage.items())), named, keys[-1] if keys else 0, shape)
        by_hand = self._names_agents and not lineage
        if by_hand:
            self.count("calls_by_hand")
        return _Work(request, conversation, request.tools, named, retry_key, lineage, by_hand, attempt)

    def _repeated(self, work: _Work) -> _Work | None:
        """The request under way that this one repeats: its client has gone, or it is the only one that it can be."""
        equal = [one for one in self._works if one.retry_key == work.retry_key and not one.scope.cancel_called]
        gone = next((one for one in equal if not one.waiting), None)
        if gone is None and len(equal) == 1 and equal[0].attempt < work.attempt:
            gone = equal[0]
        if gone is not None:
            gone.attempt = work.attempt
        return gone

    def _whole(self, request: CallRequest) -> tuple[Message, ...]:
        """All messages of a request, with those of the replies that it follows by reference."""
        if request.previous_response_id is None:
            return request.messages
        call = self.tree.call_of(request.previous_response_id)
        if call is None:
            expected = "the id of a response of this session"
            raise ApiError(
                "invalid_request", f"previous_response_id: got {request.previous_response_id!r}; expected {expected}"
            )
        before = call.conversation()
        if request.instructions is None:
            return (*before, *request.messages)
        return (request.messages[0], *before, *request.messages[1:])

    def _conversations(self) -> Conversations:
        if self._latest is None:
            if self._renderer not in _RULES:
                _RULES[self._renderer] = message_rules(self._renderer.render)
            self._latest = Conversations(_RULES[self._renderer])
        return self._latest

    async def _replies_of(self, work: _Work) -> list[CallReply]:
        """Wait for the replies; without a call that waits for it, the generation is aborted a little later."""
        work.waiting += 1
        work.scope.deadline = math.inf
        try:
            await work.done.wait()
        except anyio.get_cancelled_exc_class():
            if work.done.is_set():
                self._keep(work)
            raise
        finally:
            work.waiting -= 1
            if not work.waiting and not work.done.is_set():
                work.scope.deadline = anyio.current_time() + self._retry_seconds
        if work.error is not None:
            raise work.error
        return [call.reply for call in work.calls]

    def _keep(self, work: _Work) -> None:
        """Keep the replies for a retry: their clients have gone."""
        for call in work.calls:
            self.tree.not_delivered(call)

    async def _run(self, work: _Work) -> None:
        """Answer a request; errors go to the calls that wait for it."""
        limit = deadline(self._ends - time.monotonic())
        try:
            with work.scope, limit:
                await self._sample(work)
            if limit.expired:
                self.end(StopReason.DEADLINE)
            if len(work.calls) < work.request.n:
                self.count("cut_off" if work.waiting else "undelivered", work.request.n - len(work.calls))
        except ApiError as error:
            work.error = error
        except EndpointAway as error:
            self.fail(error)
            work.error = ApiError("conflict", f"the session has failed: {error}")
        except (GenerateFailure, HistoryRewritten) as error:
            self.end(StopReason.FAILED, Failure.of(error))
            work.error = ApiError("conflict", f"the session has failed: {error}")
        except EndpointError as error:
            self.count("failed_calls")
            self._denied[work.retry_key] = Failure.of(error)
            work.error = ApiError("server", str(error))
        except Exception as error:  # noqa: BLE001 - a broken law or an error of a policy: the waiting calls raise it
            self.fail(error)
            work.error = error
        finally:
            if work.error is None and len(work.calls) < work.request.n:  # the task group of the session is cancelled
                work.error = ApiError("conflict", "the session has ended")
            self._works.remove(work)
            if not work.waiting:
                self._keep(work)
            work.done.set()

    async def _sample(self, work: _Work) -> None:
        """Match, render, and sample the replies."""
        await self._test_tools(work)
        match = self._matched(work)
        parent, line, context, new, images = await self._context(work, match)
        start = len(line.sequence)
        prompt, n = start + len(context), work.request.n
        try:
            budget = self._budget(prompt, work.request.max_tokens, n)
        except ApiError:
            line.claimed = False
            raise
        line.append(context, new, images)
        lines = [line, *(self.tree.copy(line, prompt, len(line.messages)) for _ in range(n - 1))]
        self._calls += n
        work.numbered = True
        nodes = [
            _Node(number, parent, one, start, prompt, tuple(new)) for number, one in enumerate(lines, self._calls - n)
        ]
        async with self._in_flight.more(n * (prompt + budget)):
            if n == 1:  # a task group costs more than the rest of this function
                await self._complete(work, nodes[0], budget)
            else:
                async with first_error() as tasks:
                    for node in nodes:
                        tasks.start_soon(self._complete, work, node, budget)
        if len(work.calls) < n:
            raise ApiError("server", "the server aborted the generation")
        self._count_match(work, match, parent)

    async def _test_tools(self, work: _Work) -> None:
        """Refuse tools whose calls would be lost, as in any other rollout."""
        try:
            work.tools = await self._tools.tested(work.tools_key, work.tools)
        except ConfigError as error:
            if await self._tools.serves_any():  # these are at fault: a program, and its model, can offer any name
                self.count("refused/tools")
                raise ApiError("invalid_request", f"tools: {error}") from error
            self.fail(error)
            raise ApiError("conflict", f"the session has failed: {error}") from error

    # -- match and render ---------------------------------------------------------------------------------------------

    def _matched(self, work: _Work) -> Match:
        messages = work.conversation.messages
        match = self.tree.match(messages, work.conversation.keys, work.tools_key)
        if match.call is not None:
            self.tree.delivered(match.call)
            work.changes = echo_changes(match.call.reply.message, messages[match.known - 1])
            if work.changes and self._history == "error":
                expected = 'the reply as it was given ("append" keeps the ids, "fork" opens a new root)'
                raise HistoryRewritten(
                    f'messages[{match.known - 1}]: got {", ".join(work.changes)}; history="error" expects {expected}'
                )
            if work.changes and self._history == "fork":
                match = Match(None, rewritten_at=match.known - 1, rewritten=messages[match.known - 1].text[:80])
        most = self._limits.max_roots
        if match.call is None and most is not None and len(self.tree.roots) >= most:
            shown = "; ".join(f"message {at} became {text!r}" for at, text in self.rewrites[:3])
            raise GenerateFailure(
                f"max_roots: the program begins conversation {most + 1}; expected at most {most}"
                + (f". It rewrote its history: {shown}" if shown else "")
            )
        return match

    async def _context(
        self, work: _Work, match: Match
    ) -> tuple[Call | None, Line, TokenColumn, list[Message], tuple[ImageSpan, ...]]:
        """The call to go on from, its claimed line, and what the request adds: ids, messages and images."""
        parent, messages = match.call, work.conversation.messages
        if parent is not None:
            line = self.tree.claim(parent)
            new = self._to_render(messages[match.known :], messages[: match.known])
            try:
                bridge = await bridged(
                    self._renderer, line.messages, new, tools=work.tools, tail=parent.tail, memory=line.memory
                )
                images = self._renderer.image_spans(bridge, new)
            except ConfigError:
                line.claimed = False
                self.count("bridge_refused")
            except BaseException:
                line.claimed = False
                raise
            else:
                return parent, line, bridge, new, images
        new = self._to_render(messages)
        opening, images = await self._opening(new, work.tools)
        return None, self.tree.claim(None), opening, new, images

    async def _opening(
        self, messages: list[Message], tools: Sequence[Tool]
    ) -> tuple[TokenColumn, tuple[ImageSpan, ...]]:
        described = [Message("system", tool.description) for tool in tools]
        try:
            opening = await rendered([*messages, *described], self._renderer.opening, messages, tools)
            return opening, self._renderer.image_spans(opening, messages)
        except ConfigError as error:
            raise ApiError("invalid_request", f"the chat template cannot render these messages: {error}") from error

    def _to_render(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> list[Message]:
        """The messages with the names of tools, and with the ids that the model itself wrote into its calls."""
        return self._ids.as_written(with_tool_names(messages, before))

    def _count_match(self, work: _Work, match: Match, parent: Call | None) -> None:
        for change in work.changes:
            self.count(f"echo/{change}")
        asked, _ = work.asked(of_root=parent is None)
        if folded := self._conversations().rules.folded(asked, at_start=parent is None):
            self.count("folded_system_messages", folded)
        if match.rewritten_at is not None:
            self.count(f"rewritten_at/{match.rewritten_at}")
            if len(self.rewrites) < _REWRITES_KEPT:
                self.rewrites.append((match.rewritten_at, match.rewritten))
        if match.tools_changed:
            self.count("tools_changed")

    # -- complete and parse -------------------------------------------------------------------------------------------

    def _budget(self, prompt: int, wanted: int | None, n: int) -> int:
        """The most tokens that each of the next ``n`` replies may have.

        Raises:
            ApiError: the prompt leaves no room in the context.
        """
        budget = self._sampling.max_new_tokens if wanted is None else min(wanted, self._sampling.max_new_tokens)
        if self._limits.max_sampled_tokens is not None:
            budget = min(budget, max((self._limits.max_sampled_tokens - self.tree.sampled) // n, 1))
        if self._max_context is not None:
            if prompt >= self._max_context:
                raise self._overflow(prompt, self._max_context)
            budget = min(budget, self._max_context - prompt)
        return budget

    def _overflow(self, tokens: int, most: int) -> ApiError:
        self.count("overflow")
        self.overflowed = True
        text = f"messages: {tokens} tokens do not fit the context of the model, at most {most} tokens"
        return ApiError("overflow", text, tokens=tokens, max_context=most)

    async def _complete(self, work: _Work, node: _Node, budget: int) -> None:
        """Sample one reply and add it to the tree."""
        began, tokens = now(), node.line.sequence.tokens
        try:
            request = CompletionRequest(
                tokens,
                self._sampling_of(work.request, budget, node.number),
                self._renderer.stop_token_ids,
                session=f"{self._route}-{node.line.number}",
                route=self._route,
                images=node.line.sequence.images,
            )
            completion = await self._policy.complete(request)
        except ContextOverflow as error:
            asked = len(tokens) + budget  # the server does not say its context: it is below this
            raise self._overflow(asked, asked - 1) from error
        message = self._renderer.parse(completion.tokens, tools=work.tools, prompt=tokens[-_PROMPT_END:])
        message, stop_text = self._until_stop(message, work.request.stop, completion)
        self._count_ids(message.tool_calls)
        message, served = self._ids.give(message)
        self._count_calls(served.tool_calls, work.tools)
        reply = CallReply(
            id=f"r{node.number:08d}",
            message=served,
            finish_reason=_finish_reason(completion, served),
            usage=self._usage(completion, message),
            stop_text=stop_text,
            created=int(began),
        )
        new, instructions = work.asked(of_root=node.parent is None)
        call = Call(
            number=node.number,
            parent=node.parent,
            line=node.line,
            start=node.start,
            reply_start=node.prompt,
            new=node.new,
            tools=work.tools,
            tools_key=work.tools_key,
            request_key=work.conversation.keys[-1],
            retry_key=work.retry_key,
            completion=completion,
            message=message,
            reply=reply,
            lineage=work.lineage,
            by_hand=work.by_hand,
            began=began,
            temperature=self._sampling.sent_temperature,
            asked=new,
            instructions=instructions,
        )
        self.tree.add(call)
        self.overflowed = False
        self._denied.pop(work.retry_key, None)
        if completion.finish_reason != "abort":
            work.calls.append(call)

    def _sampling_of(self, request: CallRequest, budget: int, number: int) -> SamplingParams:
        sampling = self._sampling
        stop = tuple(dict.fromkeys((*sampling.stop, *request.stop)))
        if len(stop) > _MOST_STOPS:
            raise ApiError("invalid_request", f"stop: got {len(stop)} strings; expected at most {_MOST_STOPS}")
        seed = sampling.seed
        if seed is not None:
            seed = zlib.crc32(f"{seed}/{self.name}/{number}".encode()) & 0x7FFFFFFF
        if seed is None and budget == sampling.max_new_tokens and stop == sampling.stop:
            return sampling  # the policy has encoded this object before
        least = min(sampling.min_new_tokens, budget)
        return attrs.evolve(sampling, max_new_tokens=budget, min_new_tokens=least, stop=stop, seed=seed)

    def _until_stop(self, message: Message, stops: Sequence[str], completion: Completion) -> tuple[Message, str | None]:
        """The reply up to the stop string of the request that ended it. The kept ids contain the stop string."""
        if completion.finish_reason != "stop":
            return message, None
        found = [(place, stop) for stop in stops if (place := message.text.find(stop)) >= 0]
        if not found:
            return message, None
        place, stop = min(found)
        return attrs.evolve(message, content=message.text[:place]), stop

    def _count_ids(self, calls: Sequence[ToolCall]) -> None:
        written = [call.id for call in calls if call.id]
        if repeated := len(written) - len(set(written)):
            self.count("duplicate_call_ids", repeated)

    def _count_calls(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> None:
        known = {tool.name for tool in tools}
        for call in calls:
            if call.error is not None:
                self.count("malformed_tool_calls")
                self.count(f"malformed_tool_calls/{call.fault or 'bad_form'}")
            elif call.name not in known:
                self.count("unknown_tool_calls")

    def _usage(self, completion: Completion, message: Message) -> Usage:
        reasoning = 0
        if message.reasoning is not None:
            closing = self._renderer.encode(thought_marks(self._renderer.dialect)[1]).tolist()
            ids = completion.tokens.tolist()
            if len(closing) == 1:  # else the end of the thought is no id of its own, and its length is not known
                reasoning = ids.index(closing[0]) + 1 if closing[0] in ids else len(ids)
        return Usage(completion.prompt_tokens, len(completion.tokens), completion.cached_tokens, reasoning)


@attrs.frozen(eq=False)
class _Node:
    """The place of a call in the tree, before it has a reply."""

    number: int
    parent: Call | None
    line: Line
    start: int
    prompt: int
    """Number of ids before the reply."""
    new: tuple[Message, ...]


def _finish_reason(completion: Completion, message: Message) -> Literal["stop", "length", "tool_calls"]:
    if completion.finish_reason == "length":
        return "length"
    return "tool_calls" if message.tool_calls else "stop"
