"""The one loop: an environment and a policy take turns until one of them, or a limit, ends the episode.

Invariant: whatever happens, the environment is closed and a sealed trajectory comes back, with what there is and why it
ended. The policy is only ever sent the trajectory's own tokens (law 1), and every wait has a deadline (law 7).

Limits stop before useless work: a tool call of the last turn does not run. Where a log of turns is handed down, each
finished turn is kept in it before the next begins, and an episode that has turns there goes on from the last of them.
This module knows no sample, no reward and no group.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread
import attrs

from rollouts.dtypes import (
    Completion,
    Limits,
    Message,
    Prompt,
    SamplingParams,
    StopReason,
    TokenColumn,
    Tool,
    ToolCall,
    as_messages,
)
from rollouts.environments.base import Environment, EnvironmentFactory, Resumable, StepResult
from rollouts.errors import (
    ContextOverflow,
    EndpointError,
    EnvironmentFailure,
    Failure,
    GenerateFailure,
    boundary,
    call_foreign,
    deadline,
    function_name,
)
from rollouts.inference.base import Policy
from rollouts.renderer import Renderer
from rollouts.trajectory import Trajectory
from rollouts.turns import Turn, TurnLog, claim_turn_log, prompt_digest, replayed

__all__ = ["OnStep", "run_agent"]

OnStep = Callable[[Trajectory], None]
"""Called on the loop after each reply and each answer of the environment; to watch, not to change."""

_PROMPT_END = 16
"""Last tokens of a prompt that tell whether it opened a thinking block."""

_LONG_TEXT = 2000
"""Characters from which on rendering goes to a worker thread (about 500 tokens)."""


async def run_agent(
    prompt: Prompt,
    environment_cls: EnvironmentFactory,
    policy: Policy,
    renderer: Renderer,
    *,
    sampling: SamplingParams,
    limits: Limits | None = None,
    max_context: int | None = None,
    on_step: OnStep | None = None,
) -> Trajectory:
    """Play one episode.

    Args:
        prompt: what the environment starts with.
        environment_cls: makes a fresh environment.
        policy: samples the replies.
        renderer: messages to tokens and back.
        sampling: of each reply; a ``seed`` is mixed with the rollout's index and the turn.
        limits: when to stop.
        max_context: tokens that the model can hold, prompt and reply together.
        on_step: an observer.

    Returns:
        The sealed trajectory. Failures of the environment or the endpoint end it with ``StopReason.FAILED``.

    Raises:
        ConfigError: the chat template failed its self-test for the environment's tools.
        TokenMismatchError: a law was broken.
    """
    limits = limits or Limits()
    episode = _Episode(prompt, policy, renderer, sampling, limits, max_context, on_step, await claim_turn_log())
    environment: Environment | None = None
    failure: Failure | None = None
    stop_reason = StopReason.DEADLINE
    name = function_name(environment_cls)
    try:
        with deadline(limits.episode_seconds - episode.seconds_before):
            with boundary(EnvironmentFailure, f"{name}()"):
                environment = environment_cls()
            stop_reason = await episode.play(environment, name)
    except ContextOverflow:
        stop_reason = StopReason.CONTEXT_OVERFLOW
    except (EnvironmentFailure, EndpointError) as error:
        stop_reason, failure = StopReason.FAILED, Failure.of(error)
    finally:
        if environment is not None:
            await _close(environment, name, episode.trajectory, limits)
    if failure is None and not episode.trajectory.calls:
        failure = Failure.of(GenerateFailure(f"the episode ended before the first reply: {stop_reason.value}"))
        stop_reason = StopReason.FAILED
    return episode.trajectory.seal(stop_reason, failure)


async def _close(environment: Environment, name: str, trajectory: Trajectory, limits: Limits) -> None:
    """Close in any case, also while being cancelled; what close raises is counted and costs nobody a rollout."""
    with anyio.CancelScope(shield=True):
        try:
            await call_foreign(EnvironmentFailure, f"{name}.close", environment.close, seconds=limits.close_seconds)
        except EnvironmentFailure:
            trajectory.count("close_failures")


@attrs.define(eq=False)
class _Episode:
    """The state of one run of the loop."""

    prompt: Prompt
    policy: Policy
    renderer: Renderer
    sampling: SamplingParams
    limits: Limits
    max_context: int | None
    on_step: OnStep | None
    log: TurnLog | None = None
    trajectory: Trajectory = attrs.field(factory=Trajectory)
    session: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    calls_asked: int = 0
    began: float = attrs.field(factory=time.monotonic)
    kept: tuple[int, int, int] = (0, 0, 0)
    """Tokens, calls and messages that the log of turns has."""

    async def play(self, environment: Environment, name: str) -> StopReason:
        """Turns, until something ends them."""
        limits = self.limits
        tools = tuple(environment.tools)
        self.renderer.self_test(tools).raise_if_refused()
        turns = self._turns_before()
        if turns and isinstance(environment, Resumable):
            await self._foreign(f"{name}.restore", environment.restore, self.prompt, turns[-1].fields["snapshot"])
            self._go_on_from(turns)
        else:
            messages = as_messages(await self._foreign(f"{name}.start", environment.start, self.prompt))
            opening = await self._rendered(messages, self.renderer.opening, list(messages), tools)
            self.trajectory.add_context(opening, messages)
        for turn in range(len(self.trajectory.calls) + 1, limits.max_turns + 1):
            budget, at_limit = self._budget()
            if budget < 1:
                return at_limit
            completion = await self._complete(turn, budget)
            reply = self._add_reply(completion, tools)
            self._observe()
            if completion.finish_reason == "abort":
                return StopReason.ABORTED
            if completion.finish_reason == "length":
                if budget < self.sampling.max_new_tokens:
                    return at_limit
                if limits.on_cut == "stop":
                    return StopReason.MAX_TOKENS
            if reply.tool_calls and turn == limits.max_turns:
                return StopReason.MAX_TURNS
            if limits.max_tool_calls is not None and self.calls_asked > limits.max_tool_calls:
                return StopReason.MAX_TOOL_CALLS
            step = await self._step(environment, name, reply)
            if step.reward is not None:
                self.trajectory.step_rewards.append(float(step.reward))
            for metric, amount in step.metrics.items():
                self.trajectory.count(metric, amount)
            if step.done:
                self.trajectory.messages.extend(step.messages)
                return StopReason.TASK_COMPLETED
            if turn < limits.max_turns:
                history = list(self.trajectory.messages)
                bridge = await self._rendered(
                    step.messages, self._bridge, history, list(step.messages), tools, completion.tokens
                )
                self.trajectory.add_context(bridge, step.messages)
                self._observe()
                await self._keep_turn(environment, name)
        return StopReason.MAX_TURNS

    @property
    def seconds_before(self) -> float:
        """Wall time that the episode had before it was interrupted."""
        turns = self._turns_before()
        return float(turns[-1].fields["seconds"]) if turns else 0.0

    def _turns_before(self) -> Sequence[Turn]:
        """The turns of this episode that were finished before it was interrupted, if it can go on from there."""
        turns = self.log.turns if self.log is not None else ()
        same = turns and turns[0].fields["prompt"] == prompt_digest(self.prompt)
        return turns if same and turns[-1].resumable else ()

    def _go_on_from(self, turns: Sequence[Turn]) -> None:
        self.trajectory = replayed(turns)
        last = turns[-1].fields
        self.calls_asked, self.session = last["calls_asked"], last["session"]
        self.began -= last["seconds"]
        self.trajectory.count("turns_before_resume", len(self.trajectory.calls))
        self._all_is_kept()

    async def _keep_turn(self, environment: Environment, name: str) -> None:
        """Let the log have the turn; without a snapshot where the environment gives none, or fails to."""
        if self.log is None:
            return
        fields: dict[str, Any] = {}
        if isinstance(environment, Resumable):
            try:
                fields["snapshot"] = await self._foreign(f"{name}.snapshot", environment.snapshot)
            except EnvironmentFailure:
                self.trajectory.count("snapshot_failures")
        turn = Turn.since(
            self.trajectory,
            *self.kept,
            prompt=prompt_digest(self.prompt),
            calls_asked=self.calls_asked,
            session=self.session,
            seconds=time.monotonic() - self.began,
            **fields,
        )
        self._all_is_kept()
        await self.log.save(turn)

    def _all_is_kept(self) -> None:
        self.kept = (len(self.trajectory), len(self.trajectory.calls), len(self.trajectory.messages))

    def _budget(self) -> tuple[int, StopReason]:
        """Tokens that the next reply may have, and what it means when that is less than it wants."""
        budget, at_limit = self.sampling.max_new_tokens, StopReason.MAX_TOKENS
        for ceiling, reason in (
            (self.limits.max_tokens, StopReason.MAX_TOKENS),
            (self.max_context, StopReason.CONTEXT_OVERFLOW),
        ):
            if ceiling is not None and ceiling - len(self.trajectory) < budget:
                budget, at_limit = ceiling - len(self.trajectory), reason
        return budget, at_limit

    async def _complete(self, turn: int, budget: int) -> Completion:
        seed = self.sampling.seed
        if seed is not None:
            seed = zlib.crc32(f"{seed}/{self.prompt.index}/{turn}".encode()) & 0x7FFFFFFF
        sampling = attrs.evolve(self.sampling, max_new_tokens=budget, seed=seed)
        completion = await self.policy.complete(
            self.trajectory.tokens, sampling, stop_token_ids=self.renderer.stop_token_ids, session=self.session
        )
        self.trajectory.count("generation_seconds", completion.seconds)
        return completion

    def _add_reply(self, completion: Completion, tools: Sequence[Tool]) -> Message:
        """Store the sampled tokens and read them: calls get ids, and those that cannot run get their error."""
        reply = self.renderer.parse(completion.tokens, tools=tools, prompt=self.trajectory.tokens[-_PROMPT_END:])
        known = [tool.name for tool in tools]
        calls = []
        for call in reply.tool_calls:
            call = attrs.evolve(call, id=call.id or f"call_{self.calls_asked}")
            self.calls_asked += 1
            if call.error is not None:
                self.trajectory.count("malformed_tool_calls")
            elif call.name not in known:
                self.trajectory.count("unknown_tool_calls")
                there = f"the tools are: {', '.join(known)}" if known else "there are no tools here"
                call = attrs.evolve(call, error=f"there is no tool {call.name!r}; {there}")
            calls.append(call)
        reply = attrs.evolve(reply, tool_calls=tuple(calls))
        self.trajectory.add_reply(completion, reply)
        self.trajectory.count("tool_calls", len(calls))
        return reply

    async def _step(self, environment: Environment, name: str, reply: Message) -> StepResult:
        """One step of the environment; calls that cannot run are answered here, in their place among the results."""
        sound = tuple(call for call in reply.tool_calls if call.error is None)
        step = StepResult()
        if sound or not reply.tool_calls:
            step = await self._foreign(f"{name}.step", environment.step, attrs.evolve(reply, tool_calls=sound))
            if not isinstance(step, StepResult):
                raise EnvironmentFailure(f"{name}.step: got {step!r}; expected a StepResult")
            if not step.done and not step.messages:
                raise EnvironmentFailure(f"{name}.step: no messages and not done; expected one or the other")
        if len(sound) == len(reply.tool_calls):
            return step
        answered = {message.tool_call_id for message in step.messages}
        if not step.done and not answered.issuperset(call.id for call in sound):
            raise EnvironmentFailure(f"{name}.step: {step.messages!r}; expected a tool message for each call {sound!r}")
        return attrs.evolve(step, messages=_merged(reply.tool_calls, step.messages, has_tools=bool(environment.tools)))

    def _bridge(
        self, history: list[Message], new: list[Message], tools: tuple[Tool, ...], tail: TokenColumn
    ) -> TokenColumn:
        return self.renderer.bridge(history, new, tools=tools, tail=tail)

    async def _rendered(
        self, new: Sequence[Message], function: Callable[..., TokenColumn], *arguments: object
    ) -> TokenColumn:
        """Render new messages, in a worker thread where they are long."""
        if sum(len(message.content) for message in new) < _LONG_TEXT:
            return function(*arguments)
        return await anyio.to_thread.run_sync(function, *arguments)

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
