"""The state and the steps of one episode: its turns, its branches, and what is left of its limits.

Invariant: the policy only ever receives the tokens of the current branch (law 1). A branch that was left keeps every
token that was sampled in it; later branches contain them as context only (law 3). Limits stop the episode before
useless work: the tool calls of the last turn do not run (unless ``Limits.last_calls`` is ``"run"``), nor does a call
whose result no reply could answer.

This module neither closes the environment nor seals a trajectory; :mod:`rollouts.agent.loop` does.
"""

from __future__ import annotations

import functools
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import msgspec

from rollouts.agent.turn_log import Turn, TurnLog, prompt_digest, replayed
from rollouts.concurrency.boundary import boundary, call_foreign
from rollouts.concurrency.times import now
from rollouts.dtypes import (
    Completion,
    Limits,
    Message,
    OnRewrite,
    Prompt,
    SamplingParams,
    StopReason,
    Tool,
    ToolCall,
    as_messages,
)
from rollouts.environments.base import (
    Environment,
    Resumable,
    StepResult,
    bad_step,
    is_resumable,
    sound_opening,
    sound_step,
)
from rollouts.errors import (
    ConfigError,
    EnvironmentFailure,
    GenerateFailure,
    HistoryRewritten,
    Kind,
    TokenMismatchError,
    shortened,
)
from rollouts.inference.base import CompletionRequest, Policy, check_takes_images
from rollouts.inference.reply_parts import until_stop
from rollouts.renderer import BridgeMemory, Renderer
from rollouts.renderer.in_threads import bridged, in_thread, rendered
from rollouts.trajectory import Trajectory

__all__ = ["Episode", "OnStep", "Past"]

OnStep = Callable[[Trajectory], None]
"""An observer, called on the event loop after each reply and each result of the environment. It must not change the
trajectory."""

_PROMPT_END = 16
"""Number of last prompt tokens that show whether the prompt opened a thinking block."""

_UNPARSED = Message("assistant")

_LEAST_WAIT = 0.001
"""Seconds from which a wait before a request is a span of its own."""


def _new_session() -> str:
    return os.urandom(16).hex()


@attrs.frozen
class Past:
    """A conversation to continue."""

    trajectory: Trajectory
    """Its tokens and messages, not sealed. The last message is the last reply, unless ``state`` is ``"asked"``."""
    reply_start: int
    """Position of the first token of the last reply's turn."""
    new: tuple[Message, ...] = ()
    """Messages to append after that reply; if there are none, ``state`` decides what comes next."""
    state: Literal["replied", "cut", "asked"] = "replied"
    """``replied``: the environment answers the last reply. ``cut``: the model continues the last reply. ``asked``: the
    tokens after the last reply are in the trajectory already, and the model replies to them."""
    part_start: int | None = None
    """In a turn that the environment continued, the position after its last text; else ``None``."""
    aborted: bool = False
    """Whether the last reply was cut by an abort: what is left of its budget is that of the whole reply."""


@attrs.define(eq=False)
class Episode:
    """One episode: an environment and a policy take turns. ``branches`` only grows at its end."""

    prompt: Prompt
    policy: Policy
    renderer: Renderer
    sampling: SamplingParams
    limits: Limits
    max_context: int | None
    on_step: OnStep | None
    history: OnRewrite = "append"
    log: TurnLog | None = None
    """Where finished turns are logged; only for an episode of one branch without a past."""
    branches: list[Trajectory] = attrs.field(init=False)
    session: str = attrs.field(init=False, factory=_new_session)
    replies: int = attrs.field(init=False, default=0)
    """Number of replies, those of the past included."""
    call_count: int = attrs.field(init=False, default=0)
    """Number of tool calls in all replies, those that did not run included."""
    sampled: int = attrs.field(init=False, default=0)
    """Number of sampled tokens, over all branches."""
    reply_start: int = attrs.field(init=False, default=0)
    """Position of the first token of the last assistant turn in its branch."""
    part_start: int = attrs.field(init=False, default=0)
    """Position of the first token that the environment has not received: ``reply_start``, unless the environment
    continued the turn."""
    continues_reply: bool = attrs.field(init=False, default=False)
    """Whether the next completion continues the last reply."""
    cut_tokens: int = attrs.field(init=False, default=0)
    """Number of tokens of a cut reply that the next request continues."""
    spent_tokens: int = attrs.field(init=False, default=0)
    """Number of them that count against the budget of the reply: it was aborted."""
    rendered: str = attrs.field(init=False, default="")
    """The last prompt as the template renders it; only where ``history`` is not ``"append"``."""
    began: float = attrs.field(init=False, factory=time.monotonic)
    logged: tuple[int, int, int, int] = attrs.field(init=False, default=(0, 0, 0, 0))
    """Numbers of tokens, completions, messages and times that the turn log contains."""
    earlier: Trajectory | None = attrs.field(init=False, default=None)
    """The trajectory of the logged turns, if the episode can resume after them."""
    memory: BridgeMemory = attrs.field(init=False, factory=BridgeMemory)
    """What the bridges of the current branch depend on, so that each costs what is new."""
    seconds_before: float = attrs.field(init=False, default=0.0)
    """Wall time of the logged turns."""
    logged_prompt: int = attrs.field(init=False, default=0)
    """Digest of the prompt in the logged turns; computed once, its cost is that of the prompt's text."""

    def __attrs_post_init__(self) -> None:
        self.branches = [Trajectory(self.history)]
        if self.log is not None:
            self.logged_prompt = prompt_digest(self.prompt)
        self._load_logged_turns()

    @property
    def trajectory(self) -> Trajectory:
        """The current branch: the last one, the only one that grows."""
        return self.branches[-1]

    async def play(self, environment: Environment, name: str, past: Past | None = None) -> StopReason:
        """Play the episode until the environment or a limit ends it.

        Args:
            environment: created for this episode and not started.
            name: the environment's name, for messages and waits.
            past: a conversation to continue.
        """
        resumable = environment if is_resumable(environment) else None
        self.renderer.check_images(self.prompt.messages)
        if self.renderer.images is not None:
            check_takes_images(self.policy)
            await in_thread(self.renderer.images.check_repeats)
        turn, reply = 0, None
        # 1. Start the environment, and 2. open the conversation: a past one, an interrupted one, or a new one.
        if past is not None:
            tools, reply = await self._continue_past(environment, name, past)
        elif self.earlier is not None and resumable is not None:
            tools = await self._resume_logged(environment, resumable, name, self.earlier)
            turn = len(self.earlier.completions)
        else:
            messages, tools = await self._start_environment(environment, name)
            await self.open_conversation(messages, tools)
        while True:
            if reply is None:  # else the past ended with a reply that the environment answers first
                turn += 1
                # 3. Request a completion, 4. parse the reply, and 5. check the limits.
                reply, reason = await self.request_reply(turn, tools)
                if reason is not None:
                    return reason
                assert reply is not None, "an episode continues only with a reply"
            # 6. Step the environment.
            step = await self._step_environment(environment, name, reply, tools)
            if step.done:
                return StopReason.TASK_COMPLETED
            if turn >= self.limits.max_turns:
                return StopReason.MAX_TURNS
            # 7. Append the result: a text in the same turn, a bridge after the tokens so far, or a new branch.
            if step.continuation:
                await self._append_continuation(step.continuation, name, tools)
            else:
                await self.append_messages(step.messages, tools)
            # 8. Log the turn. Without a snapshot the first turn is enough: it shows that the episode had begun.
            if resumable is not None or turn == 1:
                await self._log_turn(resumable, name)
            reply = None

    async def request_reply(self, turn: int, tools: Sequence[Tool]) -> tuple[Message | None, StopReason | None]:
        """Steps 3 to 5 of :meth:`play`; public for a caller that runs the tools itself.

        Returns:
            The reply, ``None`` if the limits leave no token for it; and why the episode ends, ``None`` if it does not.
        """
        # 3. Request a completion.
        budget, limit = self._token_budget()
        if budget < 1:
            return None, limit
        sampling = self._begin_reply(budget)
        began = now()
        stops = self.renderer.stop_token_ids
        request = CompletionRequest(
            self.trajectory.tokens, sampling, stops, self.session, images=self.trajectory.images
        )
        completion = await self.policy.complete(request)
        if self.cut_tokens:
            before = self.trajectory.tokens[-self.cut_tokens :]
            completion = until_stop(before, completion, sampling.stop, stops, self.renderer.decode)
        self._add_times(completion, began)
        # 4. Parse the reply.
        reply = self._parse_reply(completion, tools)
        # 5. Check the limits.
        return reply, self._check_limits(completion, reply, turn, budget, limit, tools)

    # -- 1. start the environment, 2. open the conversation --

    async def _start_environment(
        self, environment: Environment, name: str
    ) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Start the environment with the prompt; return its opening messages and its tools."""
        if self._logged_turns:
            self.trajectory.count("restarted_at_resume")
        opening = await self._call_environment(f"{name}.start", environment.start, self.prompt)
        return sound_opening(opening, f"{name}.start"), self._checked_tools(environment, name)

    async def _continue_past(
        self, environment: Environment, name: str, past: Past
    ) -> tuple[tuple[Tool, ...], Message | None]:
        """Start with a past conversation; return the tools, and the last reply if the environment answers it next."""
        self.branches = [past.trajectory]
        past.trajectory.history = self.history
        messages = list(past.trajectory.messages)
        self.replies = sum(message.role == "assistant" for message in messages)
        self.call_count = sum(len(message.tool_calls) for message in messages)
        asked = past.state == "asked" and past.part_start is None
        before = messages if asked else messages[:-1]
        self.reply_start = past.reply_start - (0 if asked else self._begun_by_prompt(before))
        self.part_start = self.reply_start if past.part_start is None else past.part_start
        known = [*messages, *past.new] if past.new else before
        if past.part_start is not None and not past.new:
            known = [*before, self._turn_until(past.part_start, ())]
        prompt = attrs.evolve(self.prompt, prompt=known)
        await self._call_environment(f"{name}.start", environment.start, prompt)
        tools = self._checked_tools(environment, name)
        if self.history != "append":
            self.rendered = await rendered(before, self.renderer.render, before, tools)
        if past.new:
            await self.append_messages(past.new, tools)
        if past.new or past.state == "asked":
            self.continues_reply = not past.new and past.part_start is not None
            return tools, None
        stored = past.trajectory.messages.pop()  # parsed again below: the ids are the record, the message is a view
        self.call_count -= len(stored.tool_calls)
        self.continues_reply = past.state == "cut"
        if self.continues_reply:
            cut_start = past.reply_start if past.part_start is None else past.part_start
            self.cut_tokens = len(past.trajectory) - cut_start
            self.spent_tokens = self.cut_tokens if past.aborted else 0
            return tools, None
        reply, _ = self._parse(tools)
        past.trajectory.messages.append(self._whole_turn(reply, tools))
        return tools, reply

    def _begun_by_prompt(self, before: Sequence[Message]) -> int:
        """The number of tokens of the last turn that are the prompt's, which may end in an assistant message."""
        given = as_messages(self.prompt.prompt)
        first = given and given[-1].role == "assistant" and self.replies == sum(m.role == "assistant" for m in given)
        if not first:
            return 0
        opening = [*before, given[-1]]
        return len(self.renderer.opening(opening)) - self.renderer.reply_start(opening)

    async def _resume_logged(
        self, environment: Environment, resumable: Resumable, name: str, earlier: Trajectory
    ) -> tuple[Tool, ...]:
        """Restore the environment's last snapshot, and continue the trajectory of the logged turns."""
        last = self._logged_turns[-1].fields
        await self._call_environment(f"{name}.restore", resumable.restore, self.prompt, last["snapshot"])
        tools = self._checked_tools(environment, name)
        self.branches = [earlier]
        self.call_count, self.session = last["calls_asked"], last["session"]
        self.began -= self.seconds_before
        self.replies = last.get("replies", len(earlier.completions))
        self.reply_start = self.part_start = earlier.completions[-1].start
        if last.get("open_turn") is not None:
            self.reply_start, self.part_start, self.continues_reply = last["open_turn"], len(earlier), True
        self.sampled = int(earlier.mask.sum())
        earlier.count("turns_before_resume", len(earlier.completions))
        self._mark_logged()
        return tools

    def _checked_tools(self, environment: Environment, name: str) -> tuple[Tool, ...]:
        """The tools of a started environment; they may depend on the prompt.

        Raises:
            ConfigError: the chat template failed its self-test for them.
        """
        with boundary(EnvironmentFailure, f"{name}.tools"):
            tools = tuple(environment.tools)
        for tool in tools:
            if not isinstance(tool, Tool):
                raise EnvironmentFailure(f"{name}.tools: got {shortened(tool)}; expected Tools")
        self.renderer.self_test(tools).raise_if_refused()
        return tools

    async def open_conversation(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> None:
        """Append the opening: the tokens before the first reply.

        If the last message is an assistant message, the first reply goes on in its turn, and is parsed with its text.
        """
        opening = await rendered(messages, self.renderer.opening, list(messages), tools)
        before = messages
        if messages and messages[-1].role == "assistant":
            before = messages[:-1]
            self.reply_start = await rendered(messages, self.renderer.reply_start, list(messages), tools)
            self.part_start = self.reply_start
            self.continues_reply = True
            self.replies += 1
        self.trajectory.add_context(opening, before, self.renderer.image_spans(opening, messages))
        if self.history != "append":
            self.rendered = await rendered(before, self.renderer.render, list(before), tools)

    # -- 3. request a completion --

    @property
    def _reply_budget(self) -> int:
        """The number of tokens that the next request may sample of its reply, but for the limits."""
        return self.sampling.max_new_tokens - self.spent_tokens

    def _token_budget(self) -> tuple[int, StopReason]:
        """The number of tokens that the limits allow the next reply, and the stop reason if that is too few."""
        limits, length = self.limits, len(self.trajectory)
        budget, limit = self._reply_budget, StopReason.MAX_TOKENS
        if limits.max_tokens is not None:
            budget = min(budget, limits.max_tokens - length)
        if limits.max_sampled_tokens is not None:
            budget = min(budget, limits.max_sampled_tokens - self.sampled)
        if self.max_context is not None and self.max_context - length < budget:
            budget, limit = self.max_context - length, StopReason.CONTEXT_OVERFLOW
        return budget, limit

    def _begin_reply(self, budget: int) -> SamplingParams:
        """The parameters of the next request: at most ``budget`` tokens, and a seed mixed with the position."""
        position = f"{self.replies}+{len(self.trajectory)}" if self.continues_reply else None
        if not self.continues_reply:
            self.replies += 1
            self.reply_start = self.part_start = len(self.trajectory)
        self.continues_reply = False
        seed = self.sampling.seed
        if seed is not None:
            replacement = f"/{self.prompt.replacement}" if self.prompt.replacement else ""
            source = f"{seed}/{self.prompt.index}/{position or self.replies}{replacement}"
            seed = zlib.crc32(source.encode()) & 0x7FFFFFFF
        least = min(max(0, self.sampling.min_new_tokens - self.cut_tokens), budget)
        if (budget, least, seed) == (self.sampling.max_new_tokens, self.sampling.min_new_tokens, self.sampling.seed):
            return self.sampling
        return attrs.evolve(self.sampling, max_new_tokens=budget, min_new_tokens=least, seed=seed)

    def _add_times(self, completion: Completion, began: float) -> None:
        """Add the spans of a request that began at ``began`` and was just answered, and count what it sampled."""
        sent = began  # of a policy that does not say how long its request took
        if completion.seconds:  # the rest was no free slot, a pause, a retry or an outage
            sent = max(began, now() - completion.seconds + completion.waited)
        if sent - began >= _LEAST_WAIT:
            self.trajectory.times.add("queued", completion.server, began, sent - began)
        self.trajectory.times.ended("generating", completion.server, sent)
        self.trajectory.count("generation_seconds", completion.seconds)
        self.sampled += len(completion.tokens)

    # -- 4. parse the reply --

    def _parse_reply(self, completion: Completion, tools: Sequence[Tool]) -> Message:
        """Append the sampled tokens, and parse the reply that they complete."""
        continues = self.reply_start < self.part_start == len(self.trajectory)
        if continues:
            self.trajectory.messages.pop()  # the turn so far
        temperature = self.sampling.sent_temperature
        self.trajectory.add_reply(completion, _UNPARSED, continues=continues, temperature=temperature)
        reply, counters = self._parse(tools)
        self.trajectory.messages[-1] = self._whole_turn(reply, tools)
        for name in counters:
            self.trajectory.count(name)
        self.trajectory.count("tool_calls", len(reply.tool_calls))
        self._observe()
        return reply

    def _parse(self, tools: Sequence[Tool]) -> tuple[Message, list[str]]:
        """What the environment has not received of the last reply, parsed from its ids, and the counters to increase.

        Each call has an id, unique in the reply; a call that cannot run has an error.
        """
        reply = self._parsed(self.part_start, None, tools)
        counters: list[str] = []
        if not reply.tool_calls:
            return reply, counters
        known = [tool.name for tool in tools]
        calls: list[ToolCall] = []
        used_ids: set[str] = set()
        for call in reply.tool_calls:
            call_id, error = call.id, call.error
            if call_id in used_ids:
                counters.append("duplicate_call_ids")
                call_id = ""
            call_id = call_id or f"call{self.call_count:05d}"
            used_ids.add(call_id)
            self.call_count += 1
            if error is not None:
                counters += ["malformed_tool_calls", f"malformed_tool_calls/{call.fault or 'bad_form'}"]
            elif call.name not in known:
                counters.append("unknown_tool_calls")
                listed = f"the tools are: {', '.join(known)}" if known else "there are no tools here"
                error = f"there is no tool {call.name!r}; {listed}"
            calls.append(ToolCall(call.name, call.arguments, call_id, call.raw, error, call.fault))
        return Message(reply.role, reply.content, calls, reasoning=reply.reasoning), counters

    def _parsed(self, start: int, stop: int | None, tools: Sequence[Tool]) -> Message:
        tokens = self.trajectory.tokens
        prompt = tokens[max(start - _PROMPT_END, 0) : start]
        return self.renderer.parse(tokens[start:stop], tools=tools, prompt=prompt)

    def _turn_until(self, stop: int | None, tools: Sequence[Tool]) -> Message:
        """The text of the last assistant turn as a message without calls."""
        return attrs.evolve(self._parsed(self.reply_start, stop, tools), tool_calls=())

    def _whole_turn(self, reply: Message, tools: Sequence[Tool]) -> Message:
        """The whole assistant turn that ends with ``reply``: earlier parts of it have no calls."""
        if self.part_start == self.reply_start:
            return reply
        return attrs.evolve(self._turn_until(None, tools), tool_calls=reply.tool_calls)

    # -- 5. check the limits --

    def _check_limits(
        self,
        completion: Completion,
        reply: Message,
        turn: int,
        budget: int,
        limit: StopReason,
        tools: Sequence[Tool],
    ) -> StopReason | None:
        """Why the episode ends after this reply, before any of its calls runs; ``None`` if it continues.

        ``budget`` and ``limit`` are those that the completion was requested with.
        """
        limits, whole = self.limits, self._reply_budget
        self.cut_tokens = self.spent_tokens = 0
        if completion.finish_reason == "abort":
            return StopReason.ABORTED
        if completion.finish_reason == "length":
            if budget < whole:
                return limit
            if len(completion.tokens) < budget:  # the server ran out of context or KV cache
                return StopReason.CONTEXT_OVERFLOW
            if limits.on_cut == "stop":
                return StopReason.MAX_TOKENS
        if not reply.tool_calls:
            return None
        if turn == limits.max_turns and limits.last_calls == "skip":
            return StopReason.MAX_TURNS
        too_many = limits.max_tool_calls is not None and self.call_count > limits.max_tool_calls
        if too_many or len(reply.tool_calls) > self._parallel_calls(reply, tools):
            return StopReason.MAX_TOOL_CALLS
        left, limit = self._token_budget()
        return limit if left < 1 else None

    def _parallel_calls(self, reply: Message, tools: Sequence[Tool]) -> float:
        """The number of calls that one reply may have: the limit, and 1 if the chat template has one call a turn."""
        limit = self.limits.max_parallel_calls or math.inf
        several = len(reply.tool_calls) > 1 and bool(tools)
        return 1 if several and self.renderer.self_test(tools).calls == "one a turn" else limit

    # -- 6. step the environment --

    async def _step_environment(
        self, environment: Environment, name: str, reply: Message, tools: Sequence[Tool]
    ) -> StepResult:
        """The result of one step, with its rewards and metrics added to the trajectory."""
        step = await self._run_calls(environment, f"{name}.step", reply, has_tools=bool(tools))
        self.trajectory.add_rewards(step.rewards)
        for span in step.times:
            self.trajectory.times.add(*span)
        for metric, amount in step.metrics.items():
            self.trajectory.count(metric, amount)
        if step.done:
            self.trajectory.messages.extend(step.messages)
        return step

    async def _run_calls(self, environment: Environment, what: str, reply: Message, *, has_tools: bool) -> StepResult:
        """Step with the calls that can run; each other call gets an error message in its place among the results."""
        valid = [call for call in reply.tool_calls if call.error is None]
        if reply.tool_calls and not valid:
            step = StepResult()
        else:
            request = reply if len(valid) == len(reply.tool_calls) else attrs.evolve(reply, tool_calls=valid)
            names = ", ".join(dict.fromkeys(call.name for call in valid))
            shown = f"tool {names}" if has_tools and valid else ""
            answer = await self._call_environment(what, environment.step, request, shown=shown, kind="environment_step")
            step = sound_step(answer, what, max_bytes=self.limits.max_message_bytes)
            if not step.done and not step.messages and not step.continuation:
                raise bad_step(what, "no messages and not done; expected one or the other")
            if step.continuation and reply.tool_calls:
                expected = 'messages: this reply has tool calls; with dialect="plain", calls stay text'
                raise bad_step(what, str(ConfigError.of("StepResult.continuation", step.continuation, expected)))
        if len(valid) == len(reply.tool_calls):
            return step
        answered = {message.tool_call_id for message in step.messages}
        if not step.done and not answered.issuperset(call.id for call in valid):
            raise bad_step(what, f"{step.messages!r}; expected a tool message for each call {valid!r}")
        return attrs.evolve(step, messages=_merged(reply.tool_calls, step.messages, has_tools=has_tools))

    async def _call_environment(
        self,
        what: str,
        function: Callable[..., Any],
        *arguments: object,
        shown: str = "",
        kind: Kind = "environment_start",
    ) -> Any:
        """Call a method of the environment inside a boundary, and add up its wall time."""
        began = now()
        try:
            seconds = self.limits.step_seconds
            return await call_foreign(
                EnvironmentFailure, what, function, *arguments, seconds=seconds, shown=shown, kind=kind
            )
        finally:
            spent = now() - began
            self.trajectory.times.add("environment", what, began, spent)
            self.trajectory.count("environment_seconds", spent)

    # -- 7. append the result --

    async def append_messages(self, new: Sequence[Message], tools: tuple[Tool, ...]) -> None:
        """Append messages after the last reply: as a bridge in the current branch, or as a new branch.

        Raises:
            GenerateFailure: the template refuses them, e.g. for a call id that the model wrote.
            HistoryRewritten: the template rewrites the history, and ``history`` is ``"error"``.
        """
        try:
            if self.history == "append" or not await self._fork_if_rewritten(new, tools):
                history = self.trajectory.messages
                tail = self.trajectory.tokens[self.reply_start :]
                bridge = await bridged(self.renderer, history, new, tools=tools, tail=tail, memory=self.memory)
                self.trajectory.add_context(bridge, new, self.renderer.image_spans(bridge, new))
        except ConfigError as error:
            raise GenerateFailure(f"the template cannot render the next turn: {error}") from error
        self._observe()

    async def _append_continuation(self, text: str, name: str, tools: Sequence[Tool]) -> None:
        """Append a text of the environment to the assistant turn of the last reply.

        Raises:
            EnvironmentFailure: the text has no tokens.
            GenerateFailure: it contains a special token, which ``special_text`` refuses.
        """
        trajectory = self.trajectory
        if int(trajectory.tokens[-1]) in self.renderer.stop_token_ids:
            trajectory.count("continued_after_end")
        try:
            encoded = await rendered([Message("assistant", text)], self.renderer.continuation, text)
        except ConfigError as error:
            raise GenerateFailure(f"the text of the environment cannot follow the reply: {error}") from error
        if not len(encoded):
            expected = "a text of at least one token"
            raise bad_step(f"{name}.step", str(ConfigError.of("StepResult.continuation", text, expected)))
        trajectory.add_context(encoded)
        trajectory.count("continuations")
        self.part_start = len(trajectory)
        self.continues_reply = True
        trajectory.messages[-1] = self._turn_until(None, tools)
        self._observe()

    async def _fork_if_rewritten(self, new: Sequence[Message], tools: tuple[Tool, ...]) -> bool:
        """Render the whole conversation; open a branch with it if the template rewrites the history.

        Returns:
            Whether a branch was opened.

        Raises:
            HistoryRewritten: the history is rewritten, and ``history`` is ``"error"``.
        """
        history = self.trajectory.messages
        whole = [*history, *new]
        before, self.rendered = self.rendered, await rendered(whole, self.renderer.render, whole, tools)
        why, added = self.renderer.rewriting(
            before, self.rendered, history, new, tools, sampled=self.trajectory.tokens[self.reply_start :]
        )
        if why and self.history == "error":
            raise HistoryRewritten(f'{why} (history="error"; "append" keeps the ids, "fork" opens a new branch)')
        if why:
            encode = functools.partial(self.renderer.encode_conversation, rendered=self.rendered)
            tokens = await rendered(whole, encode, whole, tools)
            branch = Trajectory(self.history)
            branch.add_context(tokens, whole, self.renderer.image_spans(tokens, whole))
            branch.count("forks")
            branch.count("duplicated_tokens", len(tokens) - added)
            self.branches.append(branch)
            self.session = _new_session()  # the requests of one session must extend each other
        return bool(why)

    def _observe(self) -> None:
        if self.on_step is not None:
            self.on_step(self.trajectory)

    # -- 8. log the turn --

    @property
    def _logged_turns(self) -> Sequence[Turn]:
        """The turns that were logged before the rollout was interrupted."""
        return self.log.turns if self.log is not None else ()

    def _load_logged_turns(self) -> None:
        """Rebuild the trajectory of the logged turns; if they do not fit, count them and start from the beginning."""
        turns = self._logged_turns
        same = turns and turns[0].fields["prompt"] == self.logged_prompt
        if not same or not turns[-1].resumable:
            return
        try:
            seconds = float(turns[-1].fields["seconds"])
            self.earlier = replayed(turns, self.renderer.vocab_size)
        except (TokenMismatchError, LookupError, TypeError, ValueError):
            self.trajectory.count("unfit_turns_at_resume", len(turns))
        else:
            self.seconds_before = seconds

    async def _log_turn(self, environment: Resumable | None, name: str) -> None:
        """Log everything since the last logged turn; without a snapshot if the environment fails to return one."""
        if self.log is None:
            return
        fields: dict[str, Any] = {}
        try:
            if environment is not None:
                what, snapshot = f"{name}.snapshot", environment.snapshot
                state = await self._call_environment(what, snapshot, kind="environment_step")
                _check_plain(state, what)
                fields["snapshot"] = state
        except EnvironmentFailure:
            self.trajectory.count("snapshot_failures")
        turn = Turn.since(
            self.trajectory,
            *self.logged,
            prompt=self.logged_prompt,
            calls_asked=self.call_count,
            session=self.session,
            seconds=time.monotonic() - self.began,
            replies=self.replies,
            open_turn=self.reply_start if self.continues_reply else None,
            **fields,
        )
        self._mark_logged()
        await self.log.save(turn)

    def _mark_logged(self) -> None:
        messages = len(self.trajectory.messages) - self.continues_reply  # the last one still grows
        trajectory = self.trajectory
        self.logged = (len(trajectory), len(trajectory.completions), messages, len(trajectory.times))


def _check_plain(state: Any, what: str) -> None:
    """Check that a snapshot can be stored and read again.

    Raises:
        EnvironmentFailure: it is no plain data.
    """
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(state, enc_hook=lambda value: value.tolist()))
    except Exception as error:
        expected = "plain data, of the types of MessagePack"
        raise bad_step(what, f"got {shortened(state)} ({shortened(error)}); expected {expected}") from error


def _merged(calls: Sequence[ToolCall], results: Sequence[Message], *, has_tools: bool) -> tuple[Message, ...]:
    """Results in the order of the calls, with an error message in the place of each call that could not run."""
    by_id = {message.tool_call_id: message for message in results}
    errors = {
        call.id: Message("tool", f"Error: {call.error}", tool_call_id=call.id, name=call.name or None)
        if has_tools
        else Message("user", f"Error: {call.error}")
        for call in calls
        if call.error is not None
    }
    in_order = [errors.get(call.id) or by_id.get(call.id) for call in calls]
    rest = [message for message in results if message.tool_call_id not in {call.id for call in calls}]
    return tuple(message for message in [*in_order, *rest] if message is not None)
