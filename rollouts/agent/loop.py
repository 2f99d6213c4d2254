"""The one loop: an environment and a policy take turns until one of them, or a limit, ends the episode.

Invariant: whatever happens, the environment is closed and sealed trajectories come back, with what there is and why it
ended. The policy is only ever sent a trajectory's own tokens (law 1), and every wait has a deadline (law 7).

Where a log of turns is handed down and the environment can be resumed, each finished turn is kept in it before the next
begins, and an episode that has turns there goes on from the last of them. One that may fork, or that goes on from a
past, keeps none, and starts anew.

This module knows no sample, no reward and no group.
"""

from __future__ import annotations

from typing import Any

import anyio

from rollouts.agent.episode import Episode, OnStep, Past
from rollouts.agent.turn_log import claim_turn_log
from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.concurrency.deadlines import deadline
from rollouts.dtypes import Limits, OnRewrite, Prompt, SamplingParams, StopReason
from rollouts.environments.base import Environment, EnvironmentFactory
from rollouts.errors import (
    ConfigError,
    ContextOverflow,
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
        history: what to do where the template rewrites what the model has seen.
        past: a conversation to go on with. The environment is started with all of it that it is not asked about, and
            what its start returns is not shown.

    Returns:
        The sealed branches, in order; one unless ``history`` is ``"fork"``. All but the last end with
        ``StopReason.FORKED``. Failures of the environment or the endpoint end the last with ``StopReason.FAILED``.

    Raises:
        ConfigError: the chat template failed its self-test for the environment's tools.
        TokenMismatchError: a law was broken.
    """
    limits = limits or Limits()
    log = await claim_turn_log()
    plain = history == "append" and past is None
    episode = Episode(prompt, policy, renderer, sampling, limits, max_context, on_step, history, log if plain else None)
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
    except (EnvironmentFailure, EndpointError, GenerateFailure, HistoryRewritten) as error:
        stop_reason, failure = StopReason.FAILED, Failure.of(error)
    finally:
        if environment is not None:
            await _close(environment, name, episode.trajectory, limits)
    if failure is None and past is None and not episode.branches[0].completions:
        failure = Failure.of(GenerateFailure(f"the episode ended before the first reply: {stop_reason.value}"))
        stop_reason = StopReason.FAILED
    return _sealed(episode.branches, stop_reason, failure)


async def run_agent(*arguments: Any, **options: Any) -> Trajectory:
    """Play one episode in one sequence, and give it: with what :func:`run_branches` takes but ``history="fork"``."""
    if options.get("history") == "fork":
        raise ConfigError.of("history", "fork", '"append" or "error" here: run_branches gives several')
    (trajectory,) = await run_branches(*arguments, **options)
    return trajectory


def _sealed(branches: list[Trajectory], stop_reason: StopReason, failure: Failure | None) -> list[Trajectory]:
    """End them all. A branch in which the model never spoke is none: the one before it was the last."""
    if len(branches) > 1 and not branches[-1].completions:
        *branches, silent = branches
        branches[-1].messages = silent.messages
    for branch in branches[:-1]:
        branch.seal(StopReason.FORKED)
    branches[-1].seal(stop_reason, failure)
    return branches


async def _close(environment: Environment, name: str, trajectory: Trajectory, limits: Limits) -> None:
    """Close in any case, also while being cancelled; what close raises is counted and costs nobody a rollout."""
    with anyio.CancelScope(shield=True):
        try:
            await call_foreign(EnvironmentFailure, f"{name}.close", environment.close, seconds=limits.close_seconds)
        except EnvironmentFailure:
            trajectory.count("close_failures")
