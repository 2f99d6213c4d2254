"""One episode on a chat API: an environment and a model take turns in messages.

Invariant: the limits of an episode mean here what they mean in :mod:`rollouts.agent.episode`, with the token counts of
the API in place of ids. The reply of a turn is stored as it came; a call that cannot run is answered with an error
message. An environment is always closed. A limit is a stop reason; a reply that did not come is a failure; neither ends
an episode as if the model had finished. A refusal is a reply of the model, which the environment judges, and counted.

This module knows no token and no sample.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import attrs

from rollouts.agent.budget import Budget
from rollouts.agent.guarded_environment import GuardedEnvironment
from rollouts.agent.loop import within
from rollouts.agent.replies import fault_of
from rollouts.chat_api.account import Account
from rollouts.chat_api.client import ChatClient
from rollouts.chat_api.endpoint import ChatEndpoint
from rollouts.chat_api.wire import Answer, RoomExceeded, Usage, body_of, most_tokens
from rollouts.concurrency.times import now
from rollouts.dtypes import Message, Prompt, StopReason, Tool, ToolCall
from rollouts.dtypes.messages import REPLIES
from rollouts.dtypes.tools import tools_json
from rollouts.environments.base import EnvironmentFactory
from rollouts.errors import ConfigError, Failure, GenerateFailure, without_password
from rollouts.trajectory import Trajectory

__all__ = ["ChatEpisode"]


@attrs.define(eq=False)
class ChatEpisode:
    """One episode. Its trajectory has messages, rewards and counters, and no token."""

    prompt: Prompt
    endpoint: ChatEndpoint
    client: ChatClient
    account: Account
    budget: Budget
    extra: Mapping[str, Any]
    """Further fields of each request."""
    send_reasoning: bool = False
    """Whether the history has the thinking of earlier replies."""
    trajectory: Trajectory = attrs.field(init=False, factory=Trajectory)
    served: dict[str, None] = attrs.field(init=False, factory=dict)
    """The models that answered, as the API names them, in the order of their first reply."""
    fingerprints: dict[str, None] = attrs.field(init=False, factory=dict)
    ids: list[str] = attrs.field(init=False, factory=list)
    """The names of the replies."""
    stop_reason: StopReason = attrs.field(init=False, default=StopReason.DEADLINE)
    failure: Failure | None = attrs.field(init=False, default=None)
    first_reply: int = attrs.field(init=False, default=0)
    """The position of the first reply among the messages; their number before it."""
    _length: int = attrs.field(init=False, default=0)
    """Tokens of the last request and its reply, as the API counts them."""
    _calls: int = attrs.field(init=False, default=0)
    _environment: GuardedEnvironment | None = attrs.field(init=False, default=None)
    _tools: tuple[Tool, ...] = attrs.field(init=False, default=())

    async def play(self, environment_cls: EnvironmentFactory) -> None:
        """Play the episode to its end, and seal the trajectory.

        Raises:
            ConfigError: every rollout would fail alike.
            EndpointAway: the run ends, and the rollout is not lost.
        """
        with self.account.rollout():
            try:
                with within(self, self.budget.limits.episode_seconds):
                    await self._play_turns(environment_cls)
            finally:
                if self._environment is not None:
                    await self._environment.close(self.trajectory)
        too_long = self.stop_reason is StopReason.CONTEXT_OVERFLOW
        if self.failure is None and not self._replies and not too_long:
            error = GenerateFailure(f"the episode ended before the first reply: {self.stop_reason.value}")
            self.stop_reason, self.failure = StopReason.FAILED, Failure.of(error)
        self.trajectory.seal(self.stop_reason, self.failure)

    async def _play_turns(self, environment_cls: EnvironmentFactory) -> None:
        """Play until the environment or a limit ends the episode.

        An API that adds the limit of the reply to the prompt refuses a first request for its settings: a failure.
        """
        try:
            self.stop_reason = await self._turns(environment_cls)
        except RoomExceeded as error:
            if self._replies:
                raise
            self.stop_reason, self.failure = StopReason.FAILED, Failure.of(error)

    @property
    def _replies(self) -> int:
        return int(self.trajectory.metrics.get(REPLIES, 0))

    async def _turns(self, environment_cls: EnvironmentFactory) -> StopReason:
        limits, trajectory = self.budget.limits, self.trajectory
        environment = self._environment = GuardedEnvironment.create(environment_cls, limits)
        trajectory.messages.extend(await environment.open(self.prompt, trajectory))
        self._tools = environment.tools()
        trajectory.tools = tools_json(self._tools)
        self.first_reply = len(trajectory.messages)
        if trajectory.messages and trajectory.messages[-1].role == "assistant":
            expected = "a message that a reply follows: a chat API continues no turn of the assistant"
            raise GenerateFailure(str(ConfigError.of("the opening", trajectory.messages[-1], expected)))
        turn = 0
        while True:
            turn += 1
            tokens, limit = self.budget.next_reply(self._length)
            if tokens < 1:
                return limit
            reply, reason = await self._reply(turn, tokens, limit)
            if reason is not None:
                return reason
            step = await environment.step(reply, trajectory, has_tools=bool(self._tools))
            if step.done:
                return StopReason.TASK_COMPLETED
            if turn >= limits.max_turns:
                return StopReason.MAX_TURNS
            if step.continuation:
                raise GenerateFailure("the environment continues the turn of the reply, which a chat API cannot do")
            trajectory.messages.extend(step.messages)

    async def _reply(self, turn: int, tokens: int, limit: StopReason) -> tuple[Message, StopReason | None]:
        """Request a reply, store it, and check the limits before its calls run."""
        trajectory, budget = self.trajectory, self.budget
        sampling = budget.sampling_of(tokens, self._seed(turn))
        options = {"send_reasoning": self.send_reasoning}
        body = body_of(self.endpoint.model, trajectory.messages, self._tools, sampling, self.extra, **options)
        began = now()
        answer, dollars = await self.client.ask(body, self.account)
        seconds = now() - began
        trajectory.times.add("generating", without_password(self.endpoint.base_url[0]), began, seconds)
        trajectory.count("generation_seconds", seconds)
        trajectory.count(REPLIES)
        if answer.withheld:
            trajectory.count("refusals")
            self.account.refusals += 1
        self._count_usage(answer.usage, tokens, dollars)
        self.ids.append(answer.id)
        for name, seen in ((answer.served, self.served), (answer.fingerprint, self.fingerprints)):
            if name:
                seen[name] = None
        reply = self._checked(answer.message)
        trajectory.messages.append(reply)
        reason = self._after(answer, tokens, most_tokens(body), limit)
        if reason is not None or not reply.tool_calls:
            return reply, reason
        calls = len(reply.tool_calls)
        return reply, budget.before_calls(turn, calls, self._calls, self._length, one_a_turn=False)

    def _seed(self, turn: int) -> int | None:
        """The seed of a request, which differs for each rollout and turn."""
        prompt, seed = self.prompt, self.budget.sampling.seed
        if seed is None:
            return None
        replacement = f"/{prompt.replacement}" if prompt.replacement else ""
        return zlib.crc32(f"{seed}/{prompt.index}/{turn}{replacement}".encode()) & 0x7FFFFFFF

    def _after(self, answer: Answer, tokens: int, asked: int | None, limit: StopReason) -> StopReason | None:
        """Why a reply ends the episode; ``None`` if it does not.

        ``tokens``: as many as the limits allow; ``asked``: as many as the request allowed, fewer if ``extra`` says so.
        """
        if answer.finish_reason != "length":
            return None
        self.trajectory.count("cut_replies")
        if tokens == asked and tokens < self.budget.sampling.max_new_tokens:
            return limit
        if (
            answer.usage is not None and asked is not None and answer.usage.completion < asked
        ):  # the API ran out of context
            return StopReason.CONTEXT_OVERFLOW
        return StopReason.MAX_TOKENS if self.budget.limits.on_cut == "stop" else None

    def _count_usage(self, usage: Usage | None, tokens: int, dollars: float | None) -> None:
        if usage is None:  # the limits count what was allowed
            self._length += tokens
            self.budget.sampled += tokens
            self.trajectory.count("without_usage")
            return
        self._length = usage.prompt + usage.completion
        self.budget.sampled += usage.completion
        counts = {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "cached_tokens": usage.cached,
            "reasoning_tokens": usage.reasoning,
        }
        for name, count in counts.items():
            self.trajectory.count(name, count)
        if dollars is not None:
            self.trajectory.count("dollars", dollars)

    def _checked(self, reply: Message) -> Message:
        """The reply with an id for each call, unique in the rollout, and an error for each call that cannot run."""
        known = [tool.name for tool in self._tools]
        calls: list[ToolCall] = []
        used = {call.id for message in self.trajectory.messages for call in message.tool_calls}
        for call in reply.tool_calls:
            call_id = call.id
            if call_id in used:
                self.trajectory.count("duplicate_call_ids")
            if not call_id or call_id in used:
                names = (f"call{number:05d}" for number in itertools.count(self._calls))
                call_id = next(name for name in names if name not in used)
            used.add(call_id)
            self._calls += 1
            error, counters = fault_of(call, known)
            for name in counters:
                self.trajectory.count(name)
            calls.append(attrs.evolve(call, id=call_id, error=error))
        self.trajectory.count("tool_calls", len(calls))
        return attrs.evolve(reply, tool_calls=calls)
