"""Rollouts of an environment that reads and writes tokens: it renders its prompts itself, without a renderer of ours.

Invariant: the policy gets exactly the ids of the environment's observation. An observation that begins with all ids so
far continues their sequence; another one opens a new branch, in which sampled ids are context. A failed rollout is a
sample with status FAILED.

This module knows no trainer.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from rollouts.agent.budget import room_for_reply
from rollouts.agent.loop import seal, within
from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.dtypes import Completion, Endpoint, Limits, Message, Prompt, SamplingParams, StopReason, packed_tokens
from rollouts.dtypes.lazy_numpy import np
from rollouts.environments.base import StepResult, bad_step, sound_step
from rollouts.errors import ConfigError, ContextOverflow, EnvironmentFailure, Failure
from rollouts.inference.base import CompletionRequest, Policy, describe_once
from rollouts.inference.shared import shared_policy
from rollouts.training.agent_integration import generate_all, resuming
from rollouts.training.samples import trajectory_to_samples
from rollouts.training.types import Sample
from rollouts.trajectory import Trajectory

__all__ = ["Observation", "TokenEnvironment", "generate_token_batch", "token_rollout_to_samples"]


@attrs.frozen
class Observation:
    """The next observation of an environment: the whole sequence from which the reply is sampled."""

    tokens: Sequence[int] = ()
    stop: Sequence[int | str] = ()
    """Ids and strings that end the next reply."""
    done: bool = False
    """The episode is over; ``tokens`` are not read."""
    reward: float | None = None
    """Of the reply before it."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Finite numbers that are summed over the episode."""


class TokenEnvironment(Protocol):
    """One episode, created for each rollout."""

    async def start(self, prompt: Prompt) -> Observation:
        """Start the episode.

        Raises:
            ContextOverflow: its opening is longer than it allows; the rollout is truncated, not failed.
        """
        ...

    async def step(self, reply: Completion) -> Observation:
        """Answer one reply, which may have been cut (``finish_reason="length"``)."""
        ...


async def generate_token_batch(prompts: Iterable[Any], **options: Any) -> list[Sample]:
    """Run :func:`token_rollout_to_samples` for all prompts: with its options bound, a ``generate_fn``."""
    return await generate_all(token_rollout_to_samples, prompts, options)


async def token_rollout_to_samples(
    prompt: Prompt | str,
    *,
    environment_cls: Callable[[], TokenEnvironment],
    decode: Callable[[Any], str],
    endpoint: Endpoint,
    policy: Policy | None = None,
    sampling: SamplingParams | None = None,
    limits: Limits | None = None,
) -> list[Sample]:
    """Play one episode; return its branches as samples, whose reward is the sum of the environment's rewards.

    Args:
        prompt: the argument of the environment's ``start``.
        environment_cls: called without arguments to create the environment.
        decode: the text of ids, for the view of the conversation.
        endpoint: the inference server and its options.
        policy: replaces the client of ``endpoint``.
        sampling: replaces ``endpoint.sampling``; stop texts of an observation are added.
        limits: turns, tokens and seconds. The environment gets a cut reply, too.

    Raises:
        ConfigError: a limit of tool calls is set.
        EndpointAway: no server answered for too long.
    """
    limits = limits or Limits()
    for name in ("max_tool_calls", "max_parallel_calls"):
        if getattr(limits, name) is not None:
            raise ConfigError.of(f"limits.{name}", getattr(limits, name), "None: replies are tokens, without calls")
    client = shared_policy(endpoint, None) if policy is None else policy
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    context = (await describe_once(client)).max_context
    continuing = resuming(client, decode, prompt.urgency)
    given = attrs.evolve(prompt, turn_log=None, urgency=None)
    episode = _Episode(given, continuing, decode, sampling or endpoint.sampling, limits, context)
    name = function_name(environment_cls)
    with within(episode, limits.episode_seconds):
        with boundary(EnvironmentFailure, f"{name}()"):
            environment = environment_cls()
        episode.stop_reason = await episode.play(environment, name)
    if len(episode.branches) > 1 and not episode.branches[-1].completions:
        episode.branches.pop()  # its one message is the whole observation, not a turn of the branch before it
    seal(episode, episode.branches)
    return trajectory_to_samples(episode.branches, prompt, decode)


@attrs.define
class _Episode:
    prompt: Prompt
    policy: Policy
    decode: Callable[[Any], str]
    sampling: SamplingParams
    limits: Limits
    max_context: int | None
    branches: list[Trajectory] = attrs.field(init=False, factory=lambda: [Trajectory("fork")])
    stop_reason: StopReason = attrs.field(init=False, default=StopReason.DEADLINE)
    failure: Failure | None = attrs.field(init=False, default=None)
    session: str = attrs.field(init=False, factory=lambda: uuid.uuid4().hex)
    sampled: int = attrs.field(init=False, default=0)

    async def play(self, environment: TokenEnvironment, name: str) -> StopReason:
        """Play until the environment or a limit ends the episode; returns which."""
        seen = await self._call(f"{name}.start", environment.start, self.prompt)
        if seen.done:
            raise bad_step(f"{name}.start", "got done=True; expected an observation to sample a reply from")
        for turn in range(self.limits.max_turns):
            self._observe(seen, name)
            budget, limit = self._budget()
            if budget < 1:
                return limit
            reply = await self._reply(seen, turn, budget)
            if reply.finish_reason == "abort":
                return StopReason.ABORTED
            seen = await self._call(f"{name}.step", environment.step, reply)
            if seen.done:
                return StopReason.TASK_COMPLETED
        return StopReason.MAX_TURNS

    async def _call(self, what: str, function: Callable[..., Any], argument: object) -> Observation:
        """Call the environment, and add its reward and metrics to the trajectory of the reply."""
        kind: Any = "environment_start" if what.endswith(".start") else "environment_step"
        try:
            seen = await call_foreign(
                EnvironmentFailure, what, function, argument, seconds=self.limits.step_seconds, kind=kind
            )
        except EnvironmentFailure as error:
            if isinstance(error.__cause__, ContextOverflow) and kind == "environment_start":
                raise error.__cause__ from None
            raise
        if not isinstance(seen, Observation):
            raise bad_step(what, f"got {type(seen).__name__}; expected an Observation")
        step = sound_step(StepResult(done=bool(seen.done), reward=seen.reward, metrics=seen.metrics), what)
        self.branches[-1].add_rewards(step.rewards)
        for metric, amount in step.metrics.items():
            self.branches[-1].count(metric, amount)
        return seen

    def _observe(self, seen: Observation, name: str) -> None:
        """Append the new ids of an observation, or open a branch with all its ids."""
        tokens, known = packed_tokens(seen.tokens), self.branches[-1].tokens
        if not len(tokens):
            raise bad_step(name, "got an observation without tokens and not done; expected one or the other")
        if len(tokens) < len(known) or not np.array_equal(tokens[: len(known)], known):
            self.branches.append(Trajectory("fork"))
            self.branches[-1].count("forks")
            self.session, known = uuid.uuid4().hex, known[:0]
        if len(new := tokens[len(known) :]):
            self.branches[-1].add_context(new, [Message("user", self.decode(new))])

    def _budget(self) -> tuple[int, StopReason]:
        """The maximum length of the next reply, and the stop reason if it is below 1."""
        most, length = self.sampling.max_new_tokens, len(self.branches[-1])
        return room_for_reply(self.limits, most, length, self.sampled, self.max_context)

    async def _reply(self, seen: Observation, turn: int, budget: int) -> Completion:
        """Sample one reply, and append it."""
        trajectory, seed = self.branches[-1], self.sampling.seed
        if seed is not None:
            source = f"{seed}/{self.prompt.index}/{turn}/{self.prompt.replacement}"
            seed = zlib.crc32(source.encode()) & 0x7FFFFFFF
        texts = tuple(dict.fromkeys((*self.sampling.stop, *(one for one in seen.stop if isinstance(one, str)))))
        ids = tuple(one for one in seen.stop if not isinstance(one, str))
        least = min(self.sampling.min_new_tokens, budget)
        sampling = attrs.evolve(self.sampling, max_new_tokens=budget, min_new_tokens=least, stop=texts, seed=seed)
        reply = await self.policy.complete(
            CompletionRequest(trajectory.tokens, sampling, stop_token_ids=ids, session=self.session)
        )
        message = Message("assistant", self.decode(reply.tokens))
        trajectory.add_reply(reply, message, temperature=self.sampling.sent_temperature)
        trajectory.count("generation_seconds", reply.seconds)
        self.sampled += len(reply.tokens)
        return reply
