"""The environment of an episode: each call of it has a deadline, and its results are checked.

Invariant: an exception, a late answer or an invalid value of the environment is an :class:`EnvironmentFailure` that
names the method. An environment receives only calls that can run; each other call of a reply gets an error message as
its result.

This module does not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import attrs
import msgspec

from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.concurrency.times import now
from rollouts.dtypes import Limits, Message, Prompt, Tool, ToolCall
from rollouts.environments.base import (
    Environment,
    EnvironmentFactory,
    Resumable,
    StepResult,
    ToolEnvironment,
    bad_step,
    is_resumable,
    sound_opening,
    sound_step,
    sound_tools,
)
from rollouts.errors import ConfigError, EnvironmentFailure, Kind, shortened
from rollouts.trajectory import Trajectory

__all__ = ["GuardedEnvironment"]


@attrs.frozen(eq=False)
class GuardedEnvironment:
    """An environment that was created for one episode. Wall times and metrics go to the given trajectory."""

    environment: Environment
    name: str
    """For messages and waits."""
    limits: Limits
    resumable: Resumable | None
    """The environment, if it has snapshots."""

    @classmethod
    def create(cls, environment_cls: EnvironmentFactory, limits: Limits) -> GuardedEnvironment:
        name = function_name(environment_cls)
        with boundary(EnvironmentFailure, f"{name}()"):
            environment = environment_cls()
            resumable = environment if is_resumable(environment) else None
        return cls(environment, name, limits, resumable)

    async def open(self, prompt: Prompt, trajectory: Trajectory) -> tuple[Message, ...]:
        """Start with the prompt; return the opening messages."""
        opening = await self._call(trajectory, "start", prompt)
        return sound_opening(opening, f"{self.name}.start")

    async def start(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """Start with prior turns as the prompt; the messages that the environment returns are ignored."""
        await self._call(trajectory, "start", prompt)

    async def restore(self, prompt: Prompt, snapshot: Any, trajectory: Trajectory) -> None:
        """Start from a snapshot."""
        assert self.resumable is not None, "only a resumable environment has snapshots"
        await self._call(trajectory, "restore", prompt, snapshot)

    async def snapshot(self, trajectory: Trajectory) -> Any:
        """The state of a resumable environment.

        Raises:
            EnvironmentFailure: it failed, or the state cannot be stored and read again.
        """
        assert self.resumable is not None, "only a resumable environment has snapshots"
        state = await self._call(trajectory, "snapshot", kind="environment_step")
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(state, enc_hook=lambda value: value.tolist()))
        except Exception as error:
            expected = "plain data, of the types of MessagePack"
            text = f"got {shortened(state)} ({shortened(error)}); expected {expected}"
            raise bad_step(f"{self.name}.snapshot", text) from error
        return state

    def tools(self) -> tuple[Tool, ...]:
        """The tools of the started environment; they may depend on the prompt."""
        with boundary(EnvironmentFailure, f"{self.name}.tools"):
            return sound_tools(self.environment.tools, f"{self.name}.tools")

    async def step(self, reply: Message, trajectory: Trajectory, *, has_tools: bool) -> StepResult:
        """The result of one step, with its rewards and metrics added to the trajectory."""
        step = await self._run_calls(reply, trajectory, has_tools=has_tools)
        if step.reward is not None:
            trajectory.add_rewards(step.rewards)
        for span in step.times:
            trajectory.times.add(*span)
        for metric, amount in step.metrics.items():
            trajectory.count(metric, amount)
        if step.done:
            trajectory.messages.extend(step.messages)
        return step

    async def close(self, trajectory: Trajectory) -> None:
        """Close the environment, also during a cancellation. A failure is counted and does not fail the rollout."""
        what, seconds = f"{self.name}.close", self.limits.close_seconds
        try:
            try:
                close = self.environment.close
            except BaseException:  # of a property; most need no boundary here
                with boundary(EnvironmentFailure, what):
                    raise
            if isinstance(close, MethodType) and close.__func__ is ToolEnvironment.close:
                return  # inherited, and does nothing
            await call_foreign(EnvironmentFailure, what, close, seconds=seconds, kind="environment_step", shield=True)
        except EnvironmentFailure:
            trajectory.count("close_failures")

    async def _run_calls(self, reply: Message, trajectory: Trajectory, *, has_tools: bool) -> StepResult:
        """Step with the calls that can run; each other call gets an error message in its place among the results."""
        what = f"{self.name}.step"
        valid = [call for call in reply.tool_calls if call.error is None]
        all_valid = valid == [*reply.tool_calls]
        if reply.tool_calls and not valid:
            step = StepResult()
        else:
            request = reply if all_valid else attrs.evolve(reply, tool_calls=valid)
            shown = f"tool {', '.join(dict.fromkeys([call.name for call in valid]))}" if has_tools and valid else ""
            answer = await self._call(trajectory, "step", request, shown=shown, kind="environment_step")
            step = sound_step(answer, what, max_bytes=self.limits.max_message_bytes)
            if not step.done and not step.messages and not step.continuation:
                raise bad_step(what, "no messages and not done; expected one or the other")
            if step.continuation and reply.tool_calls:
                expected = 'messages: this reply has tool calls; with dialect="plain", calls stay text'
                raise bad_step(what, str(ConfigError.of("StepResult.continuation", step.continuation, expected)))
        if all_valid:
            return step
        answered = {message.tool_call_id for message in step.messages}
        if not step.done and not answered.issuperset(call.id for call in valid):
            raise bad_step(what, f"{step.messages!r}; expected a tool message for each call {valid!r}")
        return attrs.evolve(step, messages=_merged(reply.tool_calls, step.messages, has_tools=has_tools))

    async def _call(
        self, trajectory: Trajectory, method: str, *arguments: object, shown: str = "", kind: Kind = "environment_start"
    ) -> Any:
        """Call a method of the environment inside a boundary, and add up its wall time."""
        what, began = f"{self.name}.{method}", now()
        try:
            try:
                function = getattr(self.environment, method)
            except BaseException:  # of a property; most need no boundary here
                with boundary(EnvironmentFailure, what, kind=kind):
                    raise
            seconds = self.limits.step_seconds
            return await call_foreign(
                EnvironmentFailure, what, function, *arguments, seconds=seconds, shown=shown, kind=kind
            )
        finally:
            spent = now() - began
            trajectory.times.add("environment", what, began, spent)
            trajectory.count("environment_seconds", spent)


def _merged(calls: Sequence[ToolCall], results: Sequence[Message], *, has_tools: bool) -> tuple[Message, ...]:
    """Results in the order of the calls, with an error message in the place of each call that could not run."""
    answers: dict[str | None, list[Message]] = {call.id: [] for call in calls}
    rest: list[Message] = []
    for message in results:
        answers.get(message.tool_call_id, rest).append(message)
    for call in calls:
        if call.error is not None:
            text = f"Error: {call.error}"
            result = Message("tool", text, tool_call_id=call.id, name=call.name or None)
            answers[call.id] = [result if has_tools else Message("user", text)]
    return tuple([message for call in calls for message in answers[call.id]] + rest)
