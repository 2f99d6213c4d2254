"""Check of an environment before a run: plays it with random replies and reports findings within seconds.

Invariant: each finding comes from playing the environment, with replies determined by the seed, not from its source. A
finding is good, bad, or a note; an error in the environment is a finding with its location. No model and no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import attrs
import msgspec

import rollouts
from rollouts.agent import run_agent
from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.concurrency.stalls import StallWatch
from rollouts.dtypes import MAX_MESSAGE_BYTES, Limits, Message, Prompt, SamplingParams, StopReason, Tool
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import (
    TRUNCATED,
    Environment,
    EnvironmentFactory,
    StepResult,
    is_resumable,
    sound_opening,
    sound_step,
    sound_tools,
)
from rollouts.errors import ConfigError, EnvironmentFailure, shortened, source_line
from rollouts.renderer import Renderer, renderer_for
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.random_replies import RandomModel, schema_problems

__all__ = ["CheckOptions", "Finding", "Verdict", "examine"]

Verdict = Literal["good", "bad", "note"]
"""``bad`` fails the check; ``note`` does not."""
_SLOW_CANCEL = 1.0
_PACKAGE = str(Path(rollouts.__file__).parent)


@attrs.frozen(kw_only=True)
class CheckOptions:
    """Length of the episodes, and deadlines."""

    turns: int = 6
    """Most replies in one episode."""
    seed: int = 0
    """Seed of the replies."""
    step_seconds: float = 30.0
    """Deadline of each start, step and close, in seconds."""
    stall_seconds: float = 0.05
    """Longest time that the environment may block the event loop, in seconds."""


@attrs.frozen
class Finding:
    """The result of one check."""

    about: str
    verdict: Verdict
    text: str


@attrs.define(eq=False)
class _Episode:
    """One played episode."""

    opening: tuple[Message, ...] = ()
    replies: list[Message] = attrs.field(factory=list)
    results: list[StepResult] = attrs.field(factory=list)
    snapshots: list[Any] = attrs.field(factory=list)
    seconds: dict[str, list[float]] = attrs.field(factory=lambda: {"start": [], "step": [], "close": []})

    @property
    def messages(self) -> list[Message]:
        """The messages that the model would read."""
        return [*self.opening, *(message for result in self.results for message in result.messages)]

    @property
    def outputs(self) -> list[Any]:
        """The opening and every step result as plain data, for comparison."""
        return [self.opening, *(_plain(result) for result in self.results)]


async def examine(
    environment_cls: EnvironmentFactory, prompts: Sequence[Prompt], options: CheckOptions = CheckOptions()
) -> list[Finding]:
    """Play one episode for each prompt with random replies.

    Args:
        environment_cls: creates an environment.
        prompts: one for each episode.
        options: number of turns, seed and deadlines.

    Returns:
        The findings, in a fixed order.
    """
    check = _Check(options, environment_cls, prompts)
    await check.warm_up()
    folder = _folder_of(environment_cls)
    async with StallWatch(options.stall_seconds, code=() if folder is None else (folder,)) as watch:
        episodes = await check.run()
    if episodes:
        await check.agent(episodes)
        check.times(episodes)
    stalls = [
        f"{stall.seconds * 1000:.0f} ms, {stall.times} times, at {stall.place}"
        for stall in watch.stalls
        if stall.of_user  # without one, the machine was busy, or this package
    ]
    text = "; ".join(stalls) or f"the event loop was never blocked for {options.stall_seconds * 1000:.0f} ms"
    check.add("blocking calls", "bad" if stalls else "good", text)
    return check.findings


class _Check:
    """The checks of one environment, and their findings."""

    def __init__(self, options: CheckOptions, factory: EnvironmentFactory, prompts: Sequence[Prompt]) -> None:
        self.options = options
        self.factory = factory
        self.prompts = prompts
        self.name = function_name(factory)
        self.findings: list[Finding] = []

    def add(self, about: str, verdict: Verdict, text: str) -> None:
        self.findings.append(Finding(about, verdict, text))

    async def warm_up(self) -> None:
        """Create and close an environment once, so that one-time costs are not measured; :meth:`run` reports errors."""
        with contextlib.suppress(EnvironmentFailure):
            await self._foreign("close", (await self._create()).close)

    async def run(self) -> list[_Episode]:
        """Run all checks; return the episodes, an empty list if the environment fails."""
        played: list[_Episode] = []
        try:
            for number, prompt in enumerate(self.prompts):
                played.append(await self._play(prompt, self.options.seed + number, tools=number == 0))
        except EnvironmentFailure as error:
            self.add("episodes", "bad", _located(error))
            return []
        steps = sum(len(episode.results) for episode in played)
        ended = sum(bool(episode.results) and episode.results[-1].done for episode in played)
        self.add("episodes", "good", f"{len(played)} played, {steps} steps, {ended} ended by the environment")
        self._results(played)
        await self._determinism(played)
        await self._snapshots(played)
        await self._cancellation()
        return played

    # -- playing --

    async def _foreign(self, what: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method as a run does, sync or async."""
        seconds = self.options.step_seconds
        return await call_foreign(EnvironmentFailure, f"{self.name}.{what}", method, *arguments, seconds=seconds)

    async def _create(self) -> Environment:
        environment: Any = None
        try:
            with boundary(EnvironmentFailure, f"{self.name}()"):
                environment = self.factory()
                if not isinstance(environment, Environment):  # this reads its attributes
                    expected = "an object with tools, start, step and close"
                    raise EnvironmentFailure(f"{self.name}(): got {shortened(environment)}; expected {expected}")
        except EnvironmentFailure:
            with contextlib.suppress(EnvironmentFailure):
                with boundary(EnvironmentFailure, f"{self.name}.close"):  # it may be a property that raises
                    close = getattr(environment, "close", lambda: None)
                await self._foreign("close", close)
            raise
        return environment

    def _tools_of(self, environment: Environment) -> tuple[Tool, ...]:
        with boundary(EnvironmentFailure, f"{self.name}.tools"):
            return sound_tools(environment.tools, f"{self.name}.tools")

    async def _play(
        self, prompt: Prompt, seed: int, *, tools: bool = False, replies: Sequence[Message] | None = None
    ) -> _Episode:
        """Play one episode, with these replies or random ones."""
        episode, model = _Episode(), RandomModel(seed)
        environment = await self._create()
        try:
            began = time.perf_counter()
            opening = await self._foreign("start", environment.start, prompt)
            episode.seconds["start"].append(time.perf_counter() - began)
            episode.opening = sound_opening(opening, f"{self.name}.start")
            if tools:
                self._tools(environment)
            for turn in range(len(replies) if replies is not None else self.options.turns):
                reply = replies[turn] if replies is not None else model.reply(self._tools_of(environment))
                await self._step(environment, episode, reply)
                if episode.results[-1].done:
                    break
        finally:
            began = time.perf_counter()
            with anyio.CancelScope(shield=True):
                await self._foreign("close", environment.close)
            episode.seconds["close"].append(time.perf_counter() - began)
        return episode

    async def _step(self, environment: Environment, episode: _Episode, reply: Message) -> None:
        began = time.perf_counter()
        result = await self._foreign("step", environment.step, reply)
        episode.seconds["step"].append(time.perf_counter() - began)
        result = sound_step(result, f"{self.name}.step")
        episode.replies.append(reply)
        episode.results.append(result)
        if is_resumable(environment):
            episode.snapshots.append(await self._foreign("snapshot", environment.snapshot))

    # -- judging --

    def _tools(self, environment: Environment) -> None:
        tools = self._tools_of(environment)
        if not tools:
            self.add("tools", "note", "none: the model has no tool")
        for tool in tools:
            problems = schema_problems(tool)
            self.add(f"tool {tool.name}", "bad" if problems else "good", "; ".join(problems) or _signature(tool))

    def _results(self, played: Sequence[_Episode]) -> None:
        wrong = []
        for episode in played:
            for reply, result in zip(episode.replies, episode.results, strict=True):
                answered = [message.tool_call_id for message in result.messages if message.role == "tool"]
                if reply.tool_calls and not result.done and answered != [call.id for call in reply.tool_calls]:
                    wrong.append(f"{len(reply.tool_calls)} calls were answered by {len(answered)} tool messages")
                if not result.done and not result.messages and not result.continuation:
                    wrong.append("a step returned no messages and was not done")
        cut = sum(result.metrics.get(TRUNCATED, 0) for episode in played for result in episode.results)
        if cut:
            self.add("long answers", "bad", f"{cut:g} messages were longer than {MAX_MESSAGE_BYTES} bytes, and cut")
        dropped = [
            number for number, (prompt, episode) in enumerate(zip(self.prompts, played, strict=True))
            if not _contains_prompt(episode.opening, prompt)
        ]  # fmt: skip
        if dropped:
            text = f"the text of prompt {dropped[0]} is in no message that start returned; the model does not read it"
            self.add("prompt", "note", text)
        text = "; ".join(dict.fromkeys(wrong))
        self.add("answers", "bad" if wrong else "good", text or "one tool message for each call, in their order")

    async def _determinism(self, played: Sequence[_Episode]) -> None:
        for number, (prompt, first) in enumerate(zip(self.prompts, played, strict=True)):
            try:
                again = await self._play(prompt, self.options.seed + number, replies=first.replies)
            except EnvironmentFailure as error:
                self.add("determinism", "bad", f"the second time: {_located(error)}")
                return
            for step, (one, other) in enumerate(zip(first.outputs, again.outputs, strict=False)):
                if one != other:
                    where = "the opening" if step == 0 else f"step {step}"
                    text = f"prompt {number}, {where}: {shortened(one)} and then {shortened(other)}"
                    self.add("determinism", "bad", f"equal replies had different results: {text}")
                    return
        self.add("determinism", "good", "equal replies have equal results")

    async def _snapshots(self, played: Sequence[_Episode]) -> None:
        if not any(episode.snapshots for episode in played):
            self.add("snapshots", "note", "not offered: an episode that was interrupted starts again")
            return
        count = 0
        for prompt, episode in zip(self.prompts, played, strict=True):
            for step, snapshot in enumerate(episode.snapshots[:-1], 1):
                text = await self._restored(prompt, episode, step, snapshot)
                count += 1
                if text:
                    self.add("snapshots", "bad", f"restored after step {step}: {text}")
                    return
        self.add("snapshots", "good", f"{count} restored in new environments, which returned equal results")

    async def _restored(self, prompt: Prompt, episode: _Episode, step: int, snapshot: Any) -> str:
        """Describe the error in resuming from a snapshot; empty without an error."""
        try:
            decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            return f"{shortened(snapshot)} is not plain data ({error})"
        rest = _Episode()
        try:
            environment: Any = await self._create()
            try:
                await self._foreign("restore", environment.restore, prompt, decoded)
                for reply in episode.replies[step:]:
                    await self._step(environment, rest, reply)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._foreign("close", environment.close)
        except EnvironmentFailure as error:
            return _located(error)
        for one, other in zip(episode.results[step:], rest.results, strict=True):
            if _plain(one) != _plain(other):
                return f"it returns {shortened(_plain(other))}, not {shortened(_plain(one))}"
        return ""

    async def _cancellation(self) -> None:
        """Check that a cancelled step ends at once, that close works after it, and that no task is left."""
        before = asyncio.all_tasks()
        failure: EnvironmentFailure | None = None
        environment = await self._create()
        began = 0.0
        try:
            try:
                await self._foreign("start", environment.start, self.prompts[0])
                reply = RandomModel(self.options.seed, calls=1.0).reply(self._tools_of(environment))
                async with anyio.create_task_group() as tasks:

                    async def step() -> None:
                        nonlocal failure
                        try:
                            await self._foreign("step, cancelled", environment.step, reply)
                        except EnvironmentFailure as error:
                            failure = error

                    tasks.start_soon(step)
                    await anyio.lowlevel.checkpoint()
                    await anyio.lowlevel.checkpoint()
                    began = time.perf_counter()
                    tasks.cancel_scope.cancel()
                took = time.perf_counter() - began
            finally:
                with anyio.CancelScope(shield=True):
                    await self._foreign("close", environment.close)
        except EnvironmentFailure as error:
            failure = error
        if failure is not None:
            self.add("close on cancel", "bad", _located(failure))
            return
        await anyio.lowlevel.checkpoint()
        left = len(asyncio.all_tasks() - before)
        if took > _SLOW_CANCEL or left:
            text = f"a cancelled step continued for {took:.1f} s" if took > _SLOW_CANCEL else f"{left} tasks are left"
            self.add("close on cancel", "bad", text)
        else:
            self.add("close on cancel", "good", f"a cancelled step ended after {took * 1000:.0f} ms, close worked")

    async def agent(self, played: Sequence[_Episode]) -> None:
        """Play one episode through the agent loop, with the demo model's template and tokens, and its processor."""
        shown = any(message.images for episode in played for message in episode.messages)
        options: dict[str, Any] = {"images": True} if shown else {}
        renderer = await anyio.to_thread.run_sync(lambda: renderer_for(str(DEMO_MODEL), **options))
        model = RandomModel(self.options.seed)
        tools: list[Any] = []
        factory = self.factory

        def creating() -> Environment:
            environment = factory()
            tools.append(environment)
            return environment

        def reply(_: Any) -> list[int]:
            return _reply_tokens(renderer, model.reply(tuple(tools[-1].tools)))

        limits = Limits(max_turns=self.options.turns, step_seconds=self.options.step_seconds)
        sampling = SamplingParams(max_new_tokens=4096)
        try:
            trajectory = await run_agent(
                self.prompts[0], creating, ScriptedPolicy(reply), renderer, sampling=sampling, limits=limits
            )
        except ConfigError as error:
            self.add("agent", "bad", str(error))
            return
        if trajectory.failure is not None:
            self.add("agent", "bad", f"{trajectory.failure.kind}: {trajectory.failure.message}")
            return
        ended = "the environment ended it" if trajectory.stop_reason is StopReason.TASK_COMPLETED else "limits ended it"
        self.add("agent", "good", f"{len(trajectory.completions)} turns, {len(trajectory)} tokens; {ended}")

    def times(self, played: Sequence[_Episode]) -> None:
        """Report the times of start, step and close."""
        for name in ("start", "step", "close"):
            seconds = [value * 1000 for episode in played for value in episode.seconds[name]]
            if seconds:
                text = f"mean {statistics.fmean(seconds):.1f} ms, longest {max(seconds):.1f} ms"
                self.add(f"time of {name}", "good", text)


def _contains_prompt(opening: Sequence[Message], prompt: Prompt) -> bool:
    read = "\n".join(message.text for message in opening)
    return all(message.text in read for message in prompt.messages if message.role == "user")


def _reply_tokens(renderer: Renderer, reply: Message) -> list[int]:
    """The tokens of a reply in the demo model's format."""
    calls = [
        msgspec.json.encode({"name": call.name, "arguments": dict(call.arguments)}).decode()
        for call in reply.tool_calls
    ]
    text = reply.text + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return [int(token) for token in renderer.encode(f"{text}<|im_end|>")]


def _plain(result: StepResult) -> tuple[Any, ...]:
    messages = tuple(message.to_record() for message in result.messages)
    return messages, result.done, result.reward, dict(result.metrics), result.continuation


def _signature(tool: Any) -> str:
    return f"({', '.join(tool.parameters.get('properties', {}))}) {tool.description}"


def _located(error: BaseException) -> str:
    """The text of an error with its location in foreign code."""
    cause = error.__cause__
    if cause is None or source_line(cause):  # the message has it
        return str(error)
    frames = traceback.extract_tb(cause.__traceback__)
    if not frames or frames[-1].filename.startswith(_PACKAGE):
        return str(error)
    return f"{error} ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})"


def _folder_of(factory: EnvironmentFactory) -> str | None:
    """The folder of the code of an environment that is an installed package; its lines are those of a user here."""
    kind: Any = factory.func if isinstance(factory, functools.partial) else factory
    try:
        folder = str(Path(inspect.getfile(kind)).parent)
    except (TypeError, OSError):
        return None
    return None if folder.startswith(_PACKAGE) else folder
