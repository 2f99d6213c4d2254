"""The agent loop around one episode: create the environment, play, close the environment, seal the trajectories.

Invariant: the environment is always closed. Sealed trajectories with a stop reason come back, also after a failure;
only a ConfigError, a broken law and an outage of the server are raised. The policy only ever receives a trajectory's
own tokens (law 1), and every wait has a deadline (law 7).

With a turn log and a resumable environment, each finished turn is logged before the next begins, and an interrupted
episode resumes after its last logged turn. An episode that may fork, or that continues prior turns, is not logged;
after an interruption it starts from the beginning.

This module does not know samples, rewards or groups. The turns themselves are :meth:`Episode.play`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol, Required, TypedDict, Unpack

import attrs

from rollouts.agent.budget import Budget
from rollouts.agent.episode import Episode, OnStep
from rollouts.agent.prior_turns import PriorTurns
from rollouts.agent.turn_log import TurnLog
from rollouts.agent.turn_recorder import TurnRecorder
from rollouts.concurrency.deadlines import deadline
from rollouts.dtypes import Limits, OnRewrite, Prompt, SamplingParams, StopReason, Tool
from rollouts.dtypes.tools import tools_json
from rollouts.environments.base import EnvironmentFactory
from rollouts.errors import (
    ConfigError,
    ContextOverflow,
    EndpointAway,
    EndpointError,
    EnvironmentFailure,
    Failure,
    GenerateFailure,
    HistoryRewritten,
    ReplyRefused,
)
from rollouts.inference.base import Policy
from rollouts.renderer import Renderer
from rollouts.trajectory import Trajectory

__all__ = ["EpisodeOptions", "begin_episode", "play_to_end", "run_agent", "run_branches", "seal", "within"]


class EpisodeOptions(TypedDict, total=False):
    """Options of an episode."""

    sampling: Required[SamplingParams]
    """Parameters of each request. A ``seed`` is mixed with the rollout's index and the turn."""
    limits: Limits | None
    """When to stop; the defaults of :class:`Limits` if ``None``."""
    max_context: int | None
    """Context length of the model in tokens, prompt and reply together; ``None``: unlimited."""
    on_step: OnStep | None
    """Called after each reply and each result of the environment."""
    history: OnRewrite
    """The behaviour where the template rewrites the history; ``"append"`` by default."""
    prior: PriorTurns | None
    """A conversation to continue. The environment starts with it, up to the reply that it answers next; the messages
    that its ``start`` returns are ignored."""


async def run_agent(
    prompt: Prompt,
    environment_cls: EnvironmentFactory,
    policy: Policy,
    renderer: Renderer,
    **options: Unpack[EpisodeOptions],
) -> Trajectory:
    """Play one episode as one token sequence.

    Args:
        prompt: the task that the environment starts with, and the log of its turns.
        environment_cls: creates the environment of this episode.
        policy: samples the replies.
        renderer: converts messages to tokens and back.
        **options: see :class:`EpisodeOptions`; ``history`` is ``"append"`` or ``"error"``.

    Returns:
        The sealed trajectory. A failure of the environment or the endpoint ends it with ``StopReason.FAILED``.

    Raises:
        ConfigError: the chat template failed its self-test for the environment's tools, or ``history`` is ``"fork"``.
        TokenMismatchError: a law was broken.
    """
    if options.get("history") == "fork":
        raise ConfigError.of("history", "fork", '"append" or "error"; run_branches returns several trajectories')
    (trajectory,) = await run_branches(prompt, environment_cls, policy, renderer, **options)
    return trajectory


async def run_branches(
    prompt: Prompt,
    environment_cls: EnvironmentFactory,
    policy: Policy,
    renderer: Renderer,
    **options: Unpack[EpisodeOptions],
) -> list[Trajectory]:
    """Play one episode that may fork. Parameters as in :func:`run_agent`; ``history`` may be ``"fork"`` too.

    Returns:
        The sealed branches, in order; one unless ``history`` is ``"fork"``. All but the last end with
        ``StopReason.FORKED``. A failure of the environment or the endpoint ends the last with ``StopReason.FAILED``.

    Raises:
        ConfigError: the chat template failed its self-test for the environment's tools.
        EndpointAway: no server answered for too long.
        TokenMismatchError: a law was broken.
    """
    episode = await begin_episode(prompt, policy, renderer, **options)
    await play_to_end(episode, environment_cls)
    return episode.branches


async def begin_episode(
    prompt: Prompt,
    policy: Policy,
    renderer: Renderer,
    *,
    sampling: SamplingParams,
    limits: Limits | None = None,
    max_context: int | None = None,
    on_step: OnStep | None = None,
    history: OnRewrite = "append",
    prior: PriorTurns | None = None,
) -> Episode:
    """The episode of a prompt, with the turns that the prompt's log contains. Pass it to :func:`play_to_end`."""
    log: TurnLog | None = prompt.turn_log
    if log is not None or prompt.urgency is not None:
        prompt = attrs.evolve(prompt, turn_log=None, urgency=None)
    log = None if log is None else await log.claim()
    budget = Budget(limits or Limits(), sampling, max_context)
    episode = Episode(prompt, policy, renderer, budget, on_step, history, prior)
    if log is not None and history == "append" and prior is None:
        episode.recorder = TurnRecorder(log, prompt, renderer.vocab_size, episode.trajectory)
    return episode


async def play_to_end(episode: Episode, environment_cls: EnvironmentFactory) -> None:
    """Play an episode; afterwards its environment is closed and its branches are sealed.

    A failure of the environment or the endpoint ends the episode with ``StopReason.FAILED``.

    Raises:
        ConfigError, EndpointAway, TokenMismatchError: as :func:`run_branches`.
    """
    seconds_before = 0.0 if episode.recorder is None else episode.recorder.seconds_before
    try:
        with within(episode, episode.budget.limits.episode_seconds - seconds_before):
            episode.stop_reason = await episode.play(environment_cls)
    finally:
        if episode.environment is not None:
            await episode.environment.close(episode.trajectory)
    seal(episode, episode.branches, episode.tools, continues=episode.prior is not None)


class _End(Protocol):
    """The end of an episode."""

    stop_reason: StopReason
    failure: Failure | None


@contextlib.contextmanager
def within(episode: _End, seconds: float) -> Iterator[deadline]:
    """Play a part of the episode inside, for at most ``seconds``; a limit or a failure inside is the episode's end.

    Raises:
        ConfigError, EndpointAway, TokenMismatchError: as :func:`run_branches`.
    """
    try:
        with deadline(seconds) as limit:
            yield limit
    except ContextOverflow:
        episode.stop_reason = StopReason.CONTEXT_OVERFLOW
    except ReplyRefused:
        episode.stop_reason = StopReason.MALFORMED_REPLY
    except EndpointAway:
        raise
    except (EnvironmentFailure, EndpointError, GenerateFailure, HistoryRewritten) as error:
        episode.stop_reason, episode.failure = StopReason.FAILED, Failure.of(error)


def seal(
    end: _End, branches: list[Trajectory], tools: Sequence[Tool] | None = None, *, continues: bool = False
) -> None:
    """Seal all branches of an ended episode. An episode without a reply failed, unless its prompt was too long.

    A last branch without a completion is removed, and its fork does not count; the branch before it gets its messages,
    and its metrics and times since the fork, e.g. of the environment's close.
    """
    reason, failure = end.stop_reason, end.failure
    too_long = reason is StopReason.CONTEXT_OVERFLOW  # of the prompt itself: data, truncated before its reply
    if failure is None and not continues and not too_long and not branches[0].completions:
        failure = Failure.of(GenerateFailure(f"the episode ended before the first reply: {reason.value}"))
        reason = StopReason.FAILED
    *earlier, last = branches
    if tools is not None:
        schemas = tools_json(tools)
        for branch in branches:
            branch.tools = schemas
    if earlier and not last.completions:
        *earlier, kept = earlier
        kept.messages = last.messages
        for name, amount in last.metrics.items():
            if name not in ("forks", "duplicated_tokens"):
                kept.count(name, amount)
        for span in last.times:
            kept.times.add(*span)
        last = kept
    for branch in earlier:
        branch.seal(StopReason.FORKED)
    last.seal(reason, failure)
    branches[:] = [*earlier, last]
