"""The agent loop around one episode: create the environment, play, close the environment, seal the trajectories.

Invariant: the environment is always closed, and sealed trajectories with a stop reason always come back, also after a
failure. The policy only ever receives a trajectory's own tokens (law 1), and every wait has a deadline (law 7).

With a turn log and a resumable environment, each finished turn is logged before the next begins, and an interrupted
episode resumes after its last logged turn. An episode that may fork, or that continues a past, is not logged; after an
interruption it starts from the beginning.

This module knows no sample, no reward and no group. The turns themselves are :meth:`Episode.play`.
"""

from __future__ import annotations

import anyio
import attrs

from rollouts.agent.episode import Episode, OnStep, Past
from rollouts.agent.turn_log import TurnLog
from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.concurrency.deadlines import deadline
from rollouts.dtypes import Limits, OnRewrite, Prompt, SamplingParams, StopReason
from rollouts.environments.base import Environment, EnvironmentFactory
from rollouts.errors import (
    ConfigError,
    ContextOverflow,
    EndpointAway,
    EndpointError,
    EnvironmentFailure,
    Failure,
    GenerateFailure,
    HistoryRewritten,
)
from rollouts.inference.base import Policy
from rollouts.renderer import Renderer
from rollouts.trajectory import Trajectory

__all__ = ["OnStep", "Past", "run_agent", "run_branches"]


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
    history: OnRewrite = "append",
    past: Past | None = None,
) -> Trajectory:
    """Play one episode as one token sequence.

    Args:
        prompt: the task that the environment starts with, and the log of its turns.
        environment_cls: creates the environment of this episode.
        policy: samples the replies.
        renderer: converts messages to tokens and back.
        sampling: parameters of each request. A ``seed`` is mixed with the rollout's index and the turn.
        limits: when to stop; the defaults of :class:`Limits` if ``None``.
        max_context: context length of the model in tokens, prompt and reply together; ``None``: unlimited.
        on_step: called after each reply and each result of the environment.
        history: what to do where the template rewrites the history: ``"append"`` or ``"error"``.
        past: a conversation to continue. The environment starts with it, up to the reply that it answers next; the
            messages that its ``start`` returns are ignored.

    Returns:
        The sealed trajectory. A failure of the environment or the endpoint ends it with ``StopReason.FAILED``.

    Raises:
        ConfigError: the chat template failed its self-test for the environment's tools, or ``history`` is ``"fork"``.
        TokenMismatchError: a law was broken.
    """
    if history == "fork":
        raise ConfigError.of("history", history, '"append" or "error"; run_branches returns several trajectories')
    (trajectory,) = await run_branches(
        prompt,
        environment_cls,
        policy,
        renderer,
        sampling=sampling,
        limits=limits,
        max_context=max_context,
        on_step=on_step,
        history=history,
        past=past,
    )
    return trajectory


async def run_branches(
    prompt: Prompt,
    environment_cls: EnvironmentFactory,
    policy: Policy,
    renderer: Renderer,
    *,
    sampling: SamplingParams,
    limits: Limits | None = None,
    max_context: int | None = None,
    on_step: OnStep | None = None,
    history: OnRewrite = "append",
    past: Past | None = None,
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
    limits = limits or Limits()
    log: TurnLog | None = prompt.turn_log
    if log is not None:
        prompt = attrs.evolve(prompt, turn_log=None)
        log = await log.claim()
    if history != "append" or past is not None:
        log = None
    episode = Episode(prompt, policy, renderer, sampling, limits, max_context, on_step, history, log)
    environment: Environment | None = None
    failure: Failure | None = None
    stop_reason = StopReason.DEADLINE
    name = function_name(environment_cls)
    try:
        with deadline(limits.episode_seconds - episode.seconds_before):
            with boundary(EnvironmentFailure, f"{name}()"):
                environment = environment_cls()
            stop_reason = await episode.play(environment, name, past)
    except ContextOverflow:
        stop_reason = StopReason.CONTEXT_OVERFLOW
    except EndpointAway:
        raise
    except (EnvironmentFailure, EndpointError, GenerateFailure, HistoryRewritten) as error:
        stop_reason, failure = StopReason.FAILED, Failure.of(error)
    finally:
        if environment is not None:
            await _close(environment, name, episode.trajectory, limits)
    too_long = stop_reason is StopReason.CONTEXT_OVERFLOW  # of the prompt itself: data, truncated before its reply
    if failure is None and past is None and not too_long and not episode.branches[0].completions:
        failure = Failure.of(GenerateFailure(f"the episode ended before the first reply: {stop_reason.value}"))
        stop_reason = StopReason.FAILED
    return _seal(episode.branches, stop_reason, failure)


def _seal(branches: list[Trajectory], stop_reason: StopReason, failure: Failure | None) -> list[Trajectory]:
    """Seal all branches. A last branch without a completion is removed; its messages go to the branch before it."""
    if len(branches) > 1 and not branches[-1].completions:
        *branches, empty = branches
        branches[-1].messages = empty.messages
    for branch in branches[:-1]:
        branch.seal(StopReason.FORKED)
    branches[-1].seal(stop_reason, failure)
    return branches


async def _close(environment: Environment, name: str, trajectory: Trajectory, limits: Limits) -> None:
    """Close the environment, also during a cancellation. A failure is counted and does not fail the rollout."""
    with anyio.CancelScope(shield=True):
        try:
            what, seconds = f"{name}.close", limits.close_seconds
            await call_foreign(EnvironmentFailure, what, environment.close, seconds=seconds, kind="environment_step")
        except EnvironmentFailure:
            trajectory.count("close_failures")
