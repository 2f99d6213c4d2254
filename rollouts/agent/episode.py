"""The state of one run of the loop: whose turn it is, what is left of the limits, which branch grows.

Invariant: the policy is only ever sent the tokens of the branch that grows (law 1). A branch that was left holds every
token that was sampled in it; those that go on show them as context (law 3). Limits stop before useless work: a tool
call of the last turn does not run (unless it is asked for), nor one whose result no reply could answer.

This module closes nothing and seals nothing; :mod:`rollouts.agent` does.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import anyio
import anyio.to_thread
import attrs

from rollouts.agent.turn_log import Turn, TurnLog, prompt_digest, replayed
from rollouts.concurrency.boundary import call_foreign
from rollouts.dtypes import (
    Completion,
    Limits,
    Message,
    OnRewrite,
    Prompt,
    SamplingParams,
    StopReason,
    TokenColumn,
    Tool,
    ToolCall,
    as_messages,
)
from rollouts.environments.base import Environment, Resumable, StepResult, bad_step, is_resumable, sound_step
from rollouts.errors import ConfigError, EnvironmentFailure, GenerateFailure, HistoryRewritten, TokenMismatchError
from rollouts.inference.base import Policy
from rollouts.renderer import Renderer
from rollouts.trajectory import Trajectory

__all__ = ["Episode", "OnStep", "Past"]

OnStep = Callable[[Trajectory], None]
"""Called on the loop after each reply and each answer of the environment; to watch, not to change."""

_PROMPT_END = 16
"""Last tokens of a prompt that tell whether it opened a thinking block."""

_LONG_TEXT = 8000
"""Characters from which on rendering goes to a worker thread: some 2,000 tokens, 1 to 4 ms."""

_UNREAD = Message("assistant")

Rendered = TypeVar("Rendered")


def _new_session() -> str:
    return os.urandom(16).hex()


@attrs.frozen
class Past:
    """A conversation to go on with."""

    trajectory: Trajectory
    """What was seen and sampled so far, not sealed; unless it is ``asked``, its last message is the last reply."""
    reply_start: int
    """Where the last reply begins."""
    new: tuple[Message, ...] = ()
    """What comes after that reply; without any, ``state`` says what is to be done."""
    state: Literal["replied", "cut", "asked"] = "replied"
    """``replied``: the environment answers the last reply; ``cut``: it goes on where it ends; ``asked``: what came
    after it is among the tokens already, and the model is to speak."""


@attrs.define(eq=False)
class Episode:
    """One run of the loop; ``branches`` grows at its end only."""

    prompt: Prompt
    policy: Policy
    renderer: Renderer
    sampling: SamplingParams
    limits: Limits
    max_context: int | None
    on_step: OnStep | None
    history: OnRewrite = "append"
    log: TurnLog | None = None
    """Where the turns of an episode in one sequence are kept."""
    branches: list[Trajectory] = attrs.field(init=False)
    session: str = attrs.field(init=False, factory=_new_session)
    replies: int = attrs.field(init=False, default=0)
    """Replies so far, those of the past among them."""
    calls_asked: int = attrs.field(init=False, default=0)
    sampled: int = attrs.field(init=False, default=0)
    reply_start: int = attrs.field(init=False, default=0)
    continues_reply: bool = attrs.field(init=False, default=False)
    """The next tokens belong to the reply before."""
    rendered: str = attrs.field(init=False, default="")
    """The last prompt as the template writes it, where rewritten history matters."""
    began: float = attrs.field(init=False, factory=time.monotonic)
    logged: tuple[int, int, int] = attrs.field(init=False, default=(0, 0, 0))
    """Tokens, calls and messages that the log of turns has."""
    earlier: Trajectory | None = attrs.field(init=False, default=None)
    """What this episode was before it was interrupted, if it can go on from there."""
    seconds_before: float = attrs.field(init=False, default=0.0)
    """Wall time that it had by then."""

    def __attrs_post_init__(self) -> None:
        self.branches = [Trajectory(self.history)]
        self._read_earlier()

    @property
    def trajectory(self) -> Trajectory:
        """The branch that grows."""
        return self.branches[-1]

    async def play(self, environment: Environment, name: str, past: Past | None = None) -> StopReason:
        """Turns, until something ends them."""
        reply = None
        turn = 0
        resumable = environment if is_resumable(environment) else None
        if past is not None:
            tools, reply = await self._resume(environment, name, past)
        elif self.earlier is not None and resumable is not None:
            last = self._turns[-1].fields
            await self._foreign(f"{name}.restore", resumable.restore, self.prompt, last["snapshot"])
            tools = self._tools(environment)
            self._go_on_from(self.earlier, last)
            turn = self.replies
        else:
            if self._turns:
                self.trajectory.count("restarted_at_resume")
            tools = await self._open(environment, name)
        while True:
            if reply is not None:
                new, reason = await self._answer(environment, name, reply)
                if reason is not None:
                    return reason
                if turn >= self.limits.max_turns:
                    return StopReason.MAX_TURNS
                await self.show(new, tools)
                if resumable is not None or self.replies == 1:  # of what nobody can go on from: that it has begun
                    await self._keep_turn(resumable, name)
            turn += 1
            reply, reason = await self.speak(turn, tools)
            if reason is not None:
                return reason

    async def speak(self, turn: int, tools: Sequence[Tool]) -> tuple[Message | None, StopReason | None]:
        """Let the model reply: its reply, where there is room for one, and why the episode ends there, if it does."""
        budget, at_limit = self._budget()
        if budget < 1:
            return None, at_limit
        completion = await self._complete(budget)
        reply = self._add_reply(completion, tools)
        self._observe()
        cut_by = at_limit if budget < self.sampling.max_new_tokens else None
        return reply, self._ended(completion, reply, turn, cut_by)

    # -- what the model is shown --

    def _tools(self, environment: Environment) -> tuple[Tool, ...]:
        """The tools of an environment that has started: which they are may depend on the prompt.

        Raises:
            ConfigError: the chat template failed its self-test for them.
        """
        tools = tuple(environment.tools)
        self.renderer.self_test(tools).raise_if_refused()
        return tools

    async def _open(self, environment: Environment, name: str) -> tuple[Tool, ...]:
        messages = as_messages(await self._foreign(f"{name}.start", environment.start, self.prompt))
        tools = self._tools(environment)
        await self.open(messages, tools)
        return tools

    async def open(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> None:
        """Put the messages that open the conversation before the model."""
        opening = await _rendered(messages, self.renderer.opening, list(messages), tools)
        self.trajectory.add_context(opening, messages)
        if self.history != "append":
            self.rendered = await _rendered(messages, self.renderer.render, list(messages), tools)

    async def _resume(self, environment: Environment, name: str, past: Past) -> tuple[tuple[Tool, ...], Message | None]:
        """Take a conversation up; gives the tools, and its last reply if the environment is to answer it."""
        self.branches = [past.trajectory]
        self.reply_start = past.reply_start
        past.trajectory.history = self.history
        messages = list(past.trajectory.messages)
        self.replies = sum(message.role == "assistant" for message in messages)
        self.calls_asked = sum(len(message.tool_calls) for message in messages)
        before = messages if past.state == "asked" else messages[:-1]
        known = [*messages, *past.new] if past.new else before
        await self._foreign(f"{name}.start", environment.start, attrs.evolve(self.prompt, prompt=known))
        tools = self._tools(environment)
        if self.history != "append":
            self.rendered = await _rendered(before, self.renderer.render, before, tools)
        if past.new:
            await self.show(past.new, tools)
        if past.new or past.state == "asked":
            return tools, None
        stored = past.trajectory.messages.pop()  # read again from its ids, which are the record
        self.calls_asked -= len(stored.tool_calls)
        self.continues_reply = past.state == "cut"
        if self.continues_reply:
            return tools, None
        reply, _ = self._read(tools)
        past.trajectory.messages.append(reply)
        return tools, reply

    async def show(self, new: Sequence[Message], tools: tuple[Tool, ...]) -> None:
        """Put what came since the reply before the model: behind the ids kept, or in a new branch.

        Raises:
            GenerateFailure: the template refuses it, e.g. for an id that the model gave to a call.
        """
        try:
            if self.history == "append" or not await self._forked(new, tools):
                tail = self.trajectory.tokens[self.reply_start :]
                bridge = await _rendered(new, self._bridge, self.trajectory.messages, new, tools, tail)
                self.trajectory.add_context(bridge, new)
        except ConfigError as error:
            raise GenerateFailure(f"the next turn cannot be shown: {error}") from error
        self._observe()

    def _bridge(
        self, history: Sequence[Message], new: Sequence[Message], tools: tuple[Tool, ...], tail: TokenColumn
    ) -> TokenColumn:
        return self.renderer.bridge(history, new, tools=tools, tail=tail)

    async def _forked(self, new: Sequence[Message], tools: tuple[Tool, ...]) -> bool:
        """Render the whole conversation; where its past is rewritten, go on in a branch that shows it as it is now.

        Raises:
            HistoryRewritten: it is, and that is an error.
        """
        history = self.trajectory.messages
        whole = [*history, *new]
        before, self.rendered = self.rendered, await _rendered(whole, self.renderer.render, whole, tools)
        why, added = self.renderer.rewriting(
            before, self.rendered, history, new, tools, sampled=self.trajectory.tokens[self.reply_start :]
        )
        if why and self.history == "error":
            raise HistoryRewritten(f'{why} (history="error"; "append" keeps the ids, "fork" opens a new branch)')
        if why:
            tokens = await _rendered(whole, self.renderer.encode, self.rendered)
            branch = Trajectory(self.history)
            branch.add_context(tokens, whole)
            branch.count("forks")
            branch.count("duplicated_tokens", len(tokens) - added)
            self.branches.append(branch)
            self.session = _new_session()  # calls of one session only ever extend its tokens
        return bool(why)

    # -- turns that outlive the process --

    @property
    def _turns(self) -> Sequence[Turn]:
        """Turns that were kept before the rollout was interrupted."""
        return self.log.turns if self.log is not None else ()

    def _read_earlier(self) -> None:
        """Make the trajectory of the turns before again; where they do not fit, count them and begin again."""
        turns = self._turns
        same = turns and turns[0].fields["prompt"] == prompt_digest(self.prompt)
        if not same or not turns[-1].resumable:
            return
        try:
            seconds = float(turns[-1].fields["seconds"])
            self.earlier = replayed(turns, self.renderer.vocab_size)
        except (TokenMismatchError, LookupError, TypeError, ValueError):
            self.trajectory.count("unfit_turns_at_resume", len(turns))
        else:
            self.seconds_before = seconds

    def _go_on_from(self, earlier: Trajectory, last: Mapping[str, Any]) -> None:
        self.branches = [earlier]
        self.calls_asked, self.session = last["calls_asked"], last["session"]
        self.began -= self.seconds_before
        self.replies = len(self.trajectory.completions)
        self.reply_start = self.trajectory.completions[-1].start
        self.sampled = int(self.trajectory.mask.sum())
        self.trajectory.count("turns_before_resume", self.replies)
        self._all_is_kept()

    async def _keep_turn(self, environment: Resumable | None, name: str) -> None:
        """Let the log have the turn; without a snapshot where the environment fails to give one."""
        if self.log is None:
            return
        fields: dict[str, Any] = {}
        try:
            if environment is not None:
                fields["snapshot"] = await self._foreign(f"{name}.snapshot", environment.snapshot)
        except EnvironmentFailure:
            self.trajectory.count("snapshot_failures")
        turn = Turn.since(
            self.trajectory,
            *self.logged,
            prompt=prompt_digest(self.prompt),
            calls_asked=self.calls_asked,
            session=self.session,
            seconds=time.monotonic() - self.began,
            **fields,
        )
        self._all_is_kept()
        await self.log.save(turn)

    def _all_is_kept(self) -> None:
        self.logged = (len(self.trajectory), len(self.trajectory.completions), len(self.trajectory.messages))

    # -- what the model says --

    def _budget(self) -> tuple[int, StopReason]:
        """Tokens that the next reply may have, and what it means when that is less than it wants."""
        limits, length = self.limits, len(self.trajectory)
        budget, at_limit = self.sampling.max_new_tokens, StopReason.MAX_TOKENS
        if limits.max_tokens is not None:
            budget = min(budget, limits.max_tokens - length)
        if limits.max_sampled_tokens is not None:
            budget = min(budget, limits.max_sampled_tokens - self.sampled)
        if self.max_context is not None and self.max_context - length < budget:
            budget, at_limit = self.max_context - length, StopReason.CONTEXT_OVERFLOW
        return budget, at_limit

    async def _complete(self, budget: int) -> Completion:
        place = f"{self.replies}+{len(self.trajectory)}" if self.continues_reply else None
        if not self.continues_reply:
            self.replies += 1
            self.reply_start = len(self.trajectory)
        self.continues_reply = False
        seed = self.sampling.seed
        if seed is not None:
            stand_in = f"/{self.prompt.replacement}" if self.prompt.replacement else ""
            words = f"{seed}/{self.prompt.index}/{place or self.replies}{stand_in}"
            seed = zlib.crc32(words.encode()) & 0x7FFFFFFF
        sampling = self.sampling
        if budget != sampling.max_new_tokens or seed != sampling.seed:
            sampling = attrs.evolve(sampling, max_new_tokens=budget, seed=seed)
        completion = await self.policy.complete(
            self.trajectory.tokens, sampling, stop_token_ids=self.renderer.stop_token_ids, session=self.session
        )
        self.trajectory.count("generation_seconds", completion.seconds)
        self.sampled += len(completion.tokens)
        return completion

    def _add_reply(self, completion: Completion, tools: Sequence[Tool]) -> Message:
        """Store the sampled tokens, and read the reply that they end."""
        self.trajectory.add_reply(completion, _UNREAD)
        reply, counts = self._read(tools)
        self.trajectory.messages[-1] = reply
        for name in counts:
            self.trajectory.count(name)
        self.trajectory.count("tool_calls", len(reply.tool_calls))
        return reply

    def _read(self, tools: Sequence[Tool]) -> tuple[Message, list[str]]:
        """The last reply, read from its ids: calls get names, those that cannot run an error; and what to count."""
        tokens = self.trajectory.tokens
        prompt = tokens[max(self.reply_start - _PROMPT_END, 0) : self.reply_start]
        reply = self.renderer.parse(tokens[self.reply_start :], tools=tools, prompt=prompt)
        counts: list[str] = []
        if not reply.tool_calls:
            return reply, counts
        known = [tool.name for tool in tools]
        calls: list[ToolCall] = []
        taken: set[str] = set()
        for call in reply.tool_calls:
            own_id, error = call.id, call.error
            if own_id in taken:
                counts.append("duplicate_call_ids")
                own_id = ""
            own_id = own_id or f"call{self.calls_asked:05d}"
            taken.add(own_id)
            self.calls_asked += 1
            if error is not None:
                counts += ["malformed_tool_calls", f"malformed_tool_calls/{call.fault or 'bad_form'}"]
            elif call.name not in known:
                counts.append("unknown_tool_calls")
                there = f"the tools are: {', '.join(known)}" if known else "there are no tools here"
                error = f"there is no tool {call.name!r}; {there}"
            calls.append(ToolCall(call.name, call.arguments, own_id, call.raw, error, call.fault))
        return Message(reply.role, reply.content, calls, reasoning=reply.reasoning), counts

    def _ended(self, completion: Completion, reply: Message, turn: int, cut_by: StopReason | None) -> StopReason | None:
        """Why the episode ends at this reply, before anything is done with it; ``None`` if it goes on."""
        limits = self.limits
        if completion.finish_reason == "abort":
            return StopReason.ABORTED
        if completion.finish_reason == "length":
            if cut_by is not None:
                return cut_by
            if limits.on_cut == "stop":
                return StopReason.MAX_TOKENS
        if not reply.tool_calls:
            return None
        if turn == limits.max_turns and limits.last_calls == "skip":
            return StopReason.MAX_TURNS
        too_many = limits.max_tool_calls is not None and self.calls_asked > limits.max_tool_calls
        if too_many or (limits.max_parallel_calls is not None and len(reply.tool_calls) > limits.max_parallel_calls):
            return StopReason.MAX_TOOL_CALLS
        left, at_limit = self._budget()
        return at_limit if left < 1 else None

    # -- what the environment says --

    async def _answer(
        self, environment: Environment, name: str, reply: Message
    ) -> tuple[Sequence[Message], StopReason | None]:
        """The environment's answer to a reply, or the reason why there is no next turn."""
        step = await self._step(environment, name, reply)
        self.trajectory.step_rewards.extend(step.rewards)
        for metric, amount in step.metrics.items():
            self.trajectory.count(metric, amount)
        if step.done:
            self.trajectory.messages.extend(step.messages)
            return (), StopReason.TASK_COMPLETED
        return step.messages, None

    async def _step(self, environment: Environment, name: str, reply: Message) -> StepResult:
        """One step of the environment; calls that cannot run are answered here, in their place among the results."""
        sound = [call for call in reply.tool_calls if call.error is None]
        step, what = StepResult(), f"{name}.step"
        if sound or not reply.tool_calls:
            asked = reply if len(sound) == len(reply.tool_calls) else attrs.evolve(reply, tool_calls=sound)
            step = sound_step(await self._foreign(what, environment.step, asked), what)
            if not step.done and not step.messages:
                raise bad_step(what, "no messages and not done; expected one or the other")
        if len(sound) == len(reply.tool_calls):
            return step
        answered = {message.tool_call_id for message in step.messages}
        if not step.done and not answered.issuperset(call.id for call in sound):
            raise bad_step(what, f"{step.messages!r}; expected a tool message for each call {sound!r}")
        return attrs.evolve(step, messages=_merged(reply.tool_calls, step.messages, has_tools=bool(environment.tools)))

    async def _foreign(self, what: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Call the environment, and count its time."""
        began = time.monotonic()
        try:
            return await call_foreign(EnvironmentFailure, what, function, *arguments, seconds=self.limits.step_seconds)
        finally:
            self.trajectory.count("environment_seconds", time.monotonic() - began)

    def _observe(self) -> None:
        if self.on_step is not None:
            self.on_step(self.trajectory)


async def _rendered(new: Sequence[Message], function: Callable[..., Rendered], *arguments: object) -> Rendered:
    """Render new messages, in a worker thread where they are long."""
    if sum([len(message.content) for message in new]) < _LONG_TEXT:
        return function(*arguments)
    return await anyio.to_thread.run_sync(function, *arguments)


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
