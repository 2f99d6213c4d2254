"""The replies of the model to the requests of one session.

A reply takes these steps: match, render, complete, parse, add to the tree.

Invariant: no reply has more ids than the context of the model or the budgets of the session leave. A line that a
refused request has claimed is free again. This module knows no client and no retry.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import anyio.to_thread
import attrs

from rollouts.concurrency.task_groups import first_error
from rollouts.concurrency.times import now
from rollouts.dtypes import Completion, Message, SamplingParams, TokenColumn, Tool, ToolCall
from rollouts.errors import ConfigError, ContextOverflow, EndpointAway, EndpointError, EndpointRefused, Failure
from rollouts.inference.base import CompletionRequest, Policy, describe_once
from rollouts.programs.gateway.call_ids import CallIds
from rollouts.programs.gateway.contexts import Context, Contexts
from rollouts.programs.gateway.in_flight import InFlight
from rollouts.programs.gateway.requests import OpenRequest
from rollouts.programs.gateway.strict_tools import strict_tag
from rollouts.programs.gateway.tree import Call, Line, Tree
from rollouts.programs.gateway.types import (
    ApiError,
    CallReply,
    CallRequest,
    Constraint,
    Sampled,
    SessionLimits,
    Usage,
)
from rollouts.renderer import Renderer
from rollouts.renderer.dialects import thought_marks
from rollouts.renderer.reply_text import opens_thought

__all__ = ["Answers"]

_PROMPT_END = 16
"""Last prompt tokens that show whether the prompt opened a thinking block; as the renderer, which reads the reply."""
_MOST_SAMPLINGS = 16
"""Sets of parameters of one session that are kept: the policy has encoded these objects before."""
_MAX_STOPS = 32
"""Stop strings that servers accept."""


@attrs.define(eq=False)
class Answers:
    """The replies to one session."""

    _policy: Policy
    _renderer: Renderer
    _tree: Tree
    _ids: CallIds
    _counts: Counter[str]
    _contexts: Contexts
    sampling: SamplingParams
    name: str
    """The name of the rollout, for seeds."""
    _max_context: int | None
    _limits: SessionLimits
    _enforces: bool = True
    _enforces_strict: bool = False
    """Whether forms that requests want are enforced."""
    numbered: int = attrs.field(init=False, default=0)
    """The number of calls that have a number."""
    denied: dict[object, Failure] = attrs.field(init=False, factory=dict)
    """Requests that the model's server failed to answer, and that have no reply since."""
    overflowed: bool = attrs.field(init=False, default=False)
    """Whether the last call did not fit the context of the model."""
    _in_flight: InFlight = attrs.field(init=False)
    _samplings: dict[tuple[Any, ...], SamplingParams] = attrs.field(init=False, factory=dict)
    _route: str = attrs.field(init=False, factory=lambda: os.urandom(16).hex())
    """Not the key of the session: servers write routes to their logs."""

    def __attrs_post_init__(self) -> None:
        self._in_flight = InFlight(self._limits.max_tokens_in_flight)

    async def answer(self, request: OpenRequest) -> None:
        """Sample the replies to a request.

        Raises:
            ApiError: the request is refused or cannot be answered.
            ConfigError: the template or the dialect cannot serve any tools.
        """
        await self._contexts.test_tools(request)
        match = self._contexts.match(request)
        context = await self._contexts.render(request, match)
        line, n = context.line, request.sent.n
        try:
            budget = self._budget(context.stop, request.sent.max_tokens, n)
        except ApiError:
            line.claimed = False
            raise
        line.append(context.ids, context.new, context.images)
        lines = [line, *(self._tree.copy(line, context.stop, len(line.messages)) for _ in range(n - 1))]
        constraint: Constraint | None = None
        first = self.numbered
        self.numbered += n
        request.numbered = True
        try:
            constraint = await self._constraint(request, context)
            async with self._in_flight.more(n * (context.stop + budget)):
                if n == 1:  # a task group costs more than the rest of this function
                    await self._complete(request, context, line, first, budget, constraint)
                else:
                    async with first_error() as tasks:
                        for number, one in enumerate(lines, first):
                            tasks.start_soon(self._complete, request, context, one, number, budget, constraint)
        except EndpointAway:
            raise
        except EndpointError as error:
            if constraint and isinstance(error, EndpointRefused) and error.of_content:
                self._counts["refused/invalid_request"] += 1
                raise ApiError(
                    "invalid_request", f"{constraint.field}: the model's server refuses the request: {error}"
                ) from error
            self._counts["failed_calls"] += 1
            self.denied[request.retry_key] = Failure.of(error)
            raise ApiError("server", str(error)) from error
        if request.missing:
            raise ApiError("server", "the server aborted the generation")
        self._contexts.count(request, match, context.parent)

    # -- complete and parse -------------------------------------------------------------------------------------------

    def _budget(self, prompt: int, wanted: int | None, n: int) -> int:
        """The most tokens that each of the next ``n`` replies may have.

        Raises:
            ApiError: the prompt leaves no room in the context.
        """
        budget = self.sampling.max_new_tokens if wanted is None else min(wanted, self.sampling.max_new_tokens)
        if self._limits.max_sampled_tokens is not None:
            budget = min(budget, max((self._limits.max_sampled_tokens - self._tree.sampled) // n, 1))
        if self._max_context is not None:
            if prompt >= self._max_context:
                raise self._overflow(prompt, self._max_context)
            budget = min(budget, self._max_context - prompt)
        return budget

    def _overflow(self, tokens: int, max_tokens: int) -> ApiError:
        self._counts["overflow"] += 1
        self.overflowed = True
        text = f"messages: {tokens} tokens do not fit the context of the model, at most {max_tokens} tokens"
        return ApiError("overflow", text, tokens=tokens, max_context=max_tokens)

    async def _constraint(self, request: OpenRequest, context: Context) -> Constraint | None:
        """The form of the replies to a request; ``None`` and counted where it is not enforced.

        A grammar holds for the whole reply. So it is not enforced where the prompt has opened a thought or the model
        may call a tool; nor where the server does not say that it can constrain replies and report their logprobs.
        Strict tools leave thoughts and text free, and are enforced if the run asks for it, on a server with structural
        tags.
        """
        wanted, strict = request.sent.constraint, len(request.sent.strict & {tool.name for tool in request.tools})
        if self.sampling.constrained:
            for field, number in ((wanted.field if wanted else "", wanted is not None), ("strict", strict)):
                if number:
                    self._counts[f"sampling_overridden/{field}"] += int(number)
            return None
        form = None
        if wanted is not None:
            end = self._renderer.decode(context.ids[-_PROMPT_END:])
            opened = opens_thought(end, thought_marks(self._renderer.dialect)[0])
            enforced = self._enforces and not request.tools and not opened
            form = wanted if enforced and (await describe_once(self._policy)).has_grammars else None
            if form is None:
                self._counts[f"not_enforced/{wanted.field}"] += 1
        if strict:
            form = await self._strict_form(request)
            if form is None:
                self._counts["not_enforced/strict"] += strict
        if form is not None:
            self._counts["constrained_calls"] += request.sent.n
        return form

    async def _strict_form(self, request: OpenRequest) -> Constraint | None:
        if not self._enforces_strict or not (await describe_once(self._policy)).has_structural_tags:
            return None
        strict = request.sent.strict
        tag = await anyio.to_thread.run_sync(strict_tag, self._renderer, request.tools, strict)
        return None if tag is None else Constraint("strict", "structural_tag", tag)

    async def _complete(
        self,
        request: OpenRequest,
        context: Context,
        line: Line,
        number: int,
        budget: int,
        constraint: Constraint | None,
    ) -> None:
        """Sample one reply and add it to the tree."""
        began, tokens = now(), line.sequence.tokens
        try:
            wanted = CompletionRequest(
                tokens,
                self._sampling_of(request.sent, budget, number, constraint),
                self._renderer.stop_token_ids,
                session=f"{self._route}-{line.number}",
                route=self._route,
                images=line.sequence.images,
            )
            completion = await self._policy.complete(wanted)
        except ContextOverflow as error:
            length = len(tokens) + budget  # the server does not say its context: it is below this
            raise self._overflow(length, length - 1) from error
        message = self._renderer.parse(completion.tokens, tools=request.tools, prompt=tokens)
        message, stop_text = _until_stop(message, request.sent.stop, completion)
        written = message.tool_calls
        message, served = self._ids.give(message, request.sent.call_prefix)
        self._count_calls(written, served.tool_calls, request.tools)
        reply = CallReply(
            id=f"r{number:08d}",
            message=served,
            finish_reason=_finish_reason(completion, served),
            usage=self._usage(completion, message),
            stop_text=stop_text,
            created=int(began),
            sampled=self._sampled(request.sent, tokens, completion),
        )
        new, instructions = request.new_messages(of_root=context.parent is None)
        call = Call(
            number=number,
            parent=context.parent,
            line=line,
            start=context.start,
            reply_start=context.stop,
            new=context.new,
            tools=request.tools,
            tools_key=request.tools_key,
            request_key=request.conversation.keys[-1],
            retry_key=request.retry_key,
            completion=completion,
            message=message,
            reply=reply,
            lineage=request.lineage,
            by_hand=request.by_hand,
            began=began,
            temperature=self.sampling.sent_temperature,
            asked=new,
            instructions=instructions,
        )
        self._tree.add(call)
        self.overflowed = False
        self.denied.pop(request.retry_key, None)
        if completion.finish_reason != "abort":
            request.calls.append(call)

    def _sampled(self, request: CallRequest, prompt: TokenColumn, completion: Completion) -> Sampled | None:
        if not (request.logprobs or request.token_ids):
            return None
        ids = completion.tokens.tolist()
        texts = [self._renderer.decode([one]) for one in ids] if request.logprobs else []
        shown = prompt.tolist() if request.token_ids else []
        return Sampled(shown, ids, completion.logprobs.tolist(), texts)

    def _sampling_of(
        self, request: CallRequest, budget: int, number: int, constraint: Constraint | None
    ) -> SamplingParams:
        sampling = self.sampling
        stop = tuple(dict.fromkeys((*sampling.stop, *request.stop)))
        if len(stop) > _MAX_STOPS:
            raise ApiError("invalid_request", f"stop: got {len(stop)} strings; expected at most {_MAX_STOPS}")
        seed = sampling.seed
        if seed is not None:
            seed = zlib.crc32(f"{seed}/{self.name}/{number}".encode()) & 0x7FFFFFFF
        if seed is None and budget == sampling.max_new_tokens and stop == sampling.stop and constraint is None:
            return sampling  # the policy has encoded this object before
        least = min(sampling.min_new_tokens, budget)
        limits: dict[str, Any] = {"max_new_tokens": budget, "min_new_tokens": least, "stop": stop, "seed": seed}
        form = {} if constraint is None else {constraint.parameter: constraint.value}
        key = (*limits.values(), *form.items())
        if key not in self._samplings:
            try:
                made = attrs.evolve(sampling, **{**limits, **form})
            except ConfigError as error:
                raise ApiError("invalid_request", str(error)) from None
            if len(self._samplings) >= _MOST_SAMPLINGS:
                self._samplings.clear()
            self._samplings[key] = made
        return self._samplings[key]

    def _count_calls(self, written: Sequence[ToolCall], served: Sequence[ToolCall], tools: Sequence[Tool]) -> None:
        ids = [call.id for call in written if call.id]
        if repeated := len(ids) - len(set(ids)):
            self._counts["duplicate_call_ids"] += repeated
        known = {tool.name for tool in tools}
        for call in served:
            if call.error is not None:
                self._counts["malformed_tool_calls"] += 1
                self._counts[f"malformed_tool_calls/{call.fault or 'bad_form'}"] += 1
            elif call.name not in known:
                self._counts["unknown_tool_calls"] += 1

    def _usage(self, completion: Completion, message: Message) -> Usage:
        reasoning = 0
        if message.reasoning is not None:
            closing = self._renderer.encode(thought_marks(self._renderer.dialect)[1]).tolist()
            ids = completion.tokens.tolist()
            if len(closing) == 1:  # else the end of the thought has no single id, and its length is not known
                reasoning = ids.index(closing[0]) + 1 if closing[0] in ids else len(ids)
        return Usage(completion.prompt_tokens, len(completion.tokens), completion.cached_tokens, reasoning)


def _until_stop(message: Message, stops: Sequence[str], completion: Completion) -> tuple[Message, str | None]:
    """The reply up to the stop string of the request that ended it. The kept ids contain the stop string."""
    found = [(place, stop) for stop in stops if (place := message.text.find(stop)) >= 0]
    if completion.finish_reason != "stop" or not found:
        return message, None
    place, stop = min(found)
    return attrs.evolve(message, content=message.text[:place]), stop


def _finish_reason(completion: Completion, message: Message) -> Literal["stop", "length", "tool_calls"]:
    if completion.finish_reason == "length":
        return "length"
    return "tool_calls" if message.tool_calls else "stop"
