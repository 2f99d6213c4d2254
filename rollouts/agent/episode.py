"""The steps of one episode: an environment and a policy take turns in one conversation.

Invariant: the policy only ever receives the tokens of the current branch (law 1). A branch that was left keeps every
token that was sampled in it; later branches contain them as context only (law 3). Limits stop the episode before
useless work: the tool calls of the last turn do not run (unless ``Limits.last_calls`` is ``"run"``), nor does a call
whose result no reply could answer.

This module neither closes the environment nor seals a trajectory; :mod:`rollouts.agent.loop` does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rollouts.agent.budget import Budget, ReplyRequest
from rollouts.agent.guarded_environment import GuardedEnvironment
from rollouts.agent.prior_turns import PriorTurns
from rollouts.agent.replies import Replies
from rollouts.agent.turn_recorder import TurnRecorder
from rollouts.concurrency.times import now
from rollouts.dtypes import Completion, Message, OnRewrite, Prompt, StopReason, Tool
from rollouts.environments.base import EnvironmentFactory, bad_step
from rollouts.errors import ConfigError, Failure, GenerateFailure, HistoryRewritten, ReplyRefused
from rollouts.inference.base import CompletionRequest, Policy, check_takes_images
from rollouts.renderer import BridgeMemory, Renderer
from rollouts.renderer.in_threads import bridged, in_thread, rendered
from rollouts.trajectory import Trajectory

__all__ = ["Episode", "OnStep"]

OnStep = Callable[[Trajectory], None]
"""An observer, called on the event loop after each reply and each result of the environment. It must not change the
trajectory."""

_LEAST_WAIT = 0.001
"""Seconds from which a wait before a request is recorded as a span."""


def _new_session() -> str:
    return os.urandom(16).hex()


@attrs.define(eq=False)
class Episode:
    """One episode. While it plays, ``branches`` only grows at its end."""

    prompt: Prompt
    policy: Policy
    renderer: Renderer
    budget: Budget
    on_step: OnStep | None = None
    history: OnRewrite = "append"
    prior: PriorTurns | None = None
    recorder: TurnRecorder | None = None
    """Logs finished turns; only in an episode of one branch without prior turns."""
    branches: list[Trajectory] = attrs.field(init=False)
    session: str = attrs.field(init=False, factory=_new_session)
    replies: Replies = attrs.field(init=False)
    rendered: str = attrs.field(init=False, default="")
    """The last prompt as the template renders it; only where ``history`` is not ``"append"``."""
    memory: BridgeMemory = attrs.field(init=False, factory=BridgeMemory)
    """The state on which bridges of the current branch depend; a bridge then costs as much as its new messages."""
    environment: GuardedEnvironment | None = attrs.field(init=False, default=None)
    tools: tuple[Tool, ...] | None = attrs.field(init=False, default=None)
    """The tools of the environment; ``None`` before it has started."""
    stop_reason: StopReason = attrs.field(init=False, default=StopReason.DEADLINE)
    """Why the episode ended: a deadline, unless :meth:`play` returned another reason."""
    failure: Failure | None = attrs.field(init=False, default=None)
    """The failure that ended it."""

    def __attrs_post_init__(self) -> None:
        self.branches = [Trajectory(self.history)]
        self.replies = Replies(self.renderer)

    @property
    def trajectory(self) -> Trajectory:
        """The current branch: the last, which alone grows."""
        return self.branches[-1]

    async def play(self, environment_cls: EnvironmentFactory) -> StopReason:
        """Play the episode until the environment or a limit ends it."""
        limits = self.budget.limits
        environment = self.environment = GuardedEnvironment.create(environment_cls, limits)
        # 1. Start the environment, and 2. open the conversation: prior turns, logged turns, or the prompt.
        turn, reply, tools = await self._open(environment)
        while True:
            if reply is None:  # else the prior turns ended with a reply that the environment answers first
                turn += 1
                # 3. Request a completion.
                request = self._next_request()
                if isinstance(request, StopReason):
                    return request
                completion = await self.policy.complete(request.completion_request)
                # 4. Parse the reply, and 5. check the limits.
                reply, reason = self._add_reply(completion, request, turn, tools)
                if reason is not None:
                    return reason
            # 6. Step the environment.
            step = await environment.step(reply, self.trajectory, has_tools=bool(tools))
            if step.done:
                return StopReason.TASK_COMPLETED
            if turn >= limits.max_turns:
                return StopReason.MAX_TURNS
            # 7. Append the result: text in the same turn, a bridge after the tokens so far, or a new branch.
            if step.continuation:
                await self.append_continuation(step.continuation, environment.name, tools)
            else:
                await self.append_messages(step.messages, tools)
            # 8. Log the turn. Without a snapshot the first turn is enough: it shows that the episode had begun.
            if self.recorder is not None and (environment.resumable is not None or turn == 1):
                await self._log_turn(self.recorder, environment)
            reply = None

    async def request_reply(self, turn: int, tools: Sequence[Tool]) -> tuple[Message | None, StopReason | None]:
        """Steps 3 to 5 of :meth:`play`, for a caller that runs the tools itself.

        Returns:
            The reply, ``None`` if the limits leave no token for it; and why the episode ends, ``None`` if it does not.
        """
        request = self._next_request()
        if isinstance(request, StopReason):
            return None, request
        completion = await self.policy.complete(request.completion_request)
        return self._add_reply(completion, request, turn, tools)

    # -- 1. start the environment, 2. open the conversation --

    async def _open(self, environment: GuardedEnvironment) -> tuple[int, Message | None, tuple[Tool, ...]]:
        """Start the environment and open the conversation.

        Returns:
            The number of turns so far, the reply that the environment answers next (``None`` if the model is next),
            and the tools.
        """
        if not isinstance(self.prompt.prompt, str):
            self.renderer.check_images(self.prompt.messages)
        if self.renderer.images is not None:
            check_takes_images(self.policy)
            await in_thread(self.renderer.images.check_repeats)
        if self.prior is not None:
            tools, reply = await self._continue_prior(environment, self.prior)
            return 0, reply, tools
        if self.recorder is not None and self.recorder.earlier is not None and environment.resumable is not None:
            tools = await self._resume_logged(environment, self.recorder, self.recorder.earlier)
            return len(self.trajectory.completions), None, tools
        if self.recorder is not None and self.recorder.log.turns:
            self.trajectory.count("restarted_at_resume")
        messages = await environment.open(self.prompt, self.trajectory)
        tools = self.tools_of(environment)
        await self.open_conversation(messages, tools)
        return 0, None, tools

    def tools_of(self, environment: GuardedEnvironment) -> tuple[Tool, ...]:
        """The tools of the started environment.

        Raises:
            ConfigError: the chat template failed its self-test for them.
        """
        tools = self.tools = environment.tools()
        self.renderer.self_test(tools).raise_if_refused()
        return tools

    async def _continue_prior(
        self, environment: GuardedEnvironment, prior: PriorTurns
    ) -> tuple[tuple[Tool, ...], Message | None]:
        """Start with prior turns; return the tools, and the last reply if the environment answers it next."""
        trajectory = prior.trajectory
        self.branches = [trajectory]
        trajectory.history = self.history
        before = self.replies.adopt(prior, self.prompt)
        known = [*trajectory.messages, *prior.new] if prior.new else before
        if prior.part_start is not None and not prior.new:
            known = [*before, self.replies.turn_until(trajectory, prior.part_start, ())]
        await environment.start(attrs.evolve(self.prompt, prompt=known), trajectory)
        tools = self.tools_of(environment)
        if self.history != "append":
            self.rendered = await rendered(before, self.renderer.render, before, tools)
        if prior.new:
            await self.append_messages(prior.new, tools)
            return tools, None
        if prior.state == "asked":
            self.replies.continues = prior.part_start is not None
            return tools, None
        if prior.state == "replied":
            return tools, self.replies.parse_again(trajectory, tools)
        self.replies.drop_last(trajectory)  # the completed reply is parsed as a whole
        self.replies.continues = True
        cut_start = prior.reply_start if prior.part_start is None else prior.part_start
        self.budget.cut_tokens = len(trajectory) - cut_start
        self.budget.spent_tokens = self.budget.cut_tokens if prior.aborted else 0
        return tools, None

    async def _resume_logged(
        self, environment: GuardedEnvironment, recorder: TurnRecorder, earlier: Trajectory
    ) -> tuple[Tool, ...]:
        """Continue the trajectory of the logged turns, which stays if restoring the environment takes too long."""
        last = recorder.log.turns[-1].fields
        self.adopt_logged(earlier, last)
        recorder.resumed(earlier, is_open=self.replies.continues)
        await environment.restore(self.prompt, last["snapshot"], earlier)
        return self.tools_of(environment)

    def adopt_logged(self, earlier: Trajectory, last: Mapping[str, Any]) -> None:
        """Continue the trajectory of logged turns; ``last`` are the fields of the last of them."""
        self.branches = [earlier]
        self.session = last["session"]
        replies = self.replies
        replies.call_count = last["calls_asked"]
        replies.count = last.get("replies", len(earlier.completions))
        replies.start = replies.part_start = earlier.completions[-1].start
        if last.get("open_turn") is not None:
            replies.continue_after(last["open_turn"], len(earlier))
        self.budget.sampled = int(earlier.mask.sum())
        earlier.count("turns_before_resume", len(earlier.completions))

    async def open_conversation(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> None:
        """Append the opening: the tokens before the first reply.

        If the last message is an assistant message, the first reply continues its turn, and is parsed with its text.
        """
        opening = await rendered(messages, self.renderer.opening, list(messages), tools)
        before = messages
        if messages and messages[-1].role == "assistant":
            before = messages[:-1]
            start = await rendered(messages, self.renderer.reply_start, list(messages), tools)
            self.replies.continue_after(start, start)
            self.replies.count += 1
        self.trajectory.add_context(opening, before, self.renderer.image_spans(opening, messages))
        if self.history != "append":
            self.rendered = await rendered(before, self.renderer.render, list(before), tools)

    # -- 3. request a completion, 4. parse the reply, 5. check the limits --

    def _next_request(self) -> ReplyRequest | StopReason:
        """The next request, or the limit that leaves no token for its reply."""
        trajectory, budget = self.trajectory, self.budget
        length = len(trajectory)
        tokens, limit = budget.next_reply(length)
        if tokens < 1:
            return limit
        sampling = budget.sampling_of(tokens, self.replies.begin(length, budget.sampling.seed, self.prompt))
        stops, version = self.renderer.stop_token_ids, _last_version(trajectory)
        images = trajectory.images
        request = CompletionRequest(trajectory.tokens, sampling, stops, self.session, images=images, version=version)
        return ReplyRequest(request, limit, now())

    def _add_reply(
        self, completion: Completion, request: ReplyRequest, turn: int, tools: Sequence[Tool]
    ) -> tuple[Message, StopReason | None]:
        """Append the sampled tokens, and parse the reply that they complete.

        Returns:
            The reply, and why the episode ends before any of its calls runs; ``None`` if it continues.
        """
        trajectory, budget = self.trajectory, self.budget
        cut = budget.cut_tokens
        if cut:
            from rollouts.inference.reply_parts import until_stop  # here: few replies continue a cut one

            stop, stop_token_ids = budget.sampling.stop, self.renderer.stop_token_ids
            completion = until_stop(trajectory.tokens[-cut:], completion, stop, stop_token_ids, self.renderer.decode)
        _add_times(trajectory, completion, request.began)
        budget.sampled += len(completion.tokens)
        reply = self.replies.add(trajectory, completion, tools, budget.sampling.sent_temperature)
        self._observe()
        reason, calls = budget.after_completion(trajectory.completions[-1], request), len(reply.tool_calls)
        if reason is not None or not calls:
            return reply, reason
        one_a_turn = calls > 1 and bool(tools) and self.renderer.self_test(tools).calls == "one a turn"
        total, length = self.replies.call_count, len(trajectory)
        return reply, budget.before_calls(turn, calls, total, length, one_a_turn=one_a_turn)

    # -- 7. append the result --

    async def append_messages(self, new: Sequence[Message], tools: tuple[Tool, ...]) -> None:
        """Append messages after the last reply: as a bridge in the current branch, or as a new branch.

        Raises:
            ReplyRefused: the template refuses the reply, e.g. an empty one.
            GenerateFailure: the template refuses the messages.
            HistoryRewritten: the template rewrites the history, and ``history`` is ``"error"``.
        """
        try:
            if self.history == "append" or not await self._fork_if_rewritten(new, tools):
                trajectory = self.trajectory
                history, tail = trajectory.messages, trajectory.tokens[self.replies.start :]
                bridge = await bridged(self.renderer, history, new, tools=tools, tail=tail, memory=self.memory)
                trajectory.add_context(bridge, new, self.renderer.image_spans(bridge, new))
        except ConfigError as error:
            refused = self.renderer.refuses_reply(self.trajectory.messages, new, tools)
            failure = ReplyRefused if refused else GenerateFailure
            raise failure(f"the template cannot render the next turn: {error}") from error
        self._observe()

    async def append_continuation(self, text: str, name: str, tools: Sequence[Tool]) -> None:
        """Append the environment's text to the assistant turn of the last reply.

        Raises:
            EnvironmentFailure: the text has no tokens.
            GenerateFailure: it contains a special token, which ``special_text`` refuses.
        """
        trajectory, replies = self.trajectory, self.replies
        if int(trajectory.tokens[-1]) in self.renderer.stop_token_ids:
            trajectory.count("continued_after_end")
        try:
            encoded = await rendered([Message("assistant", text)], self.renderer.continuation, text)
        except ConfigError as error:
            raise GenerateFailure(f"the text of the environment cannot follow the reply: {error}") from error
        if not len(encoded):
            expected = "text of at least one token"
            raise bad_step(f"{name}.step", str(ConfigError.of("StepResult.continuation", text, expected)))
        trajectory.add_context(encoded)
        trajectory.count("continuations")
        replies.continue_after(replies.start, len(trajectory))
        trajectory.messages[-1] = replies.turn_until(trajectory, None, tools)
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
        sampled = self.trajectory.tokens[self.replies.start :]
        why, added = self.renderer.rewriting(before, self.rendered, history, new, tools, sampled=sampled)
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

    async def _log_turn(self, recorder: TurnRecorder, environment: GuardedEnvironment) -> None:
        replies = self.replies
        await recorder.save(
            self.trajectory,
            environment,
            replies.start if replies.continues else None,
            calls_asked=replies.call_count,
            session=self.session,
            replies=replies.count,
        )


def _last_version(trajectory: Trajectory) -> str:
    """The version of the last sampled token; empty if there is none."""
    for segment in reversed(trajectory.segments):
        if segment.version is not None:
            return segment.version
    return ""


def _add_times(trajectory: Trajectory, completion: Completion, began: float) -> None:
    """Add the spans of a request that began at ``began`` and was just answered."""
    sent, ended = began, now()  # sent at once, if the policy does not say how long its request took
    if completion.seconds:  # the rest was a wait for a free slot, a pause, a retry or an outage
        sent = max(began, ended - completion.seconds + completion.waited)
    if sent - began >= _LEAST_WAIT:
        trajectory.times.add("queued", completion.server, began, sent - began)
    trajectory.times.add("generating", completion.server, sent, ended - sent)
    trajectory.count("generation_seconds", completion.seconds)
