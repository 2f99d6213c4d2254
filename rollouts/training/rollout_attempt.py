"""One attempt at one rollout: generate, check, score.

Invariant: what a user's function raises becomes a sample with status FAILED that says why; a broken law, and a config
that no rollout could survive, go through. What comes back is placed, packed, and scored where it is sound.

This module knows no group, no second attempt and no journal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rollouts.agent.turn_log import TurnLog, keeping_turns
from rollouts.concurrency.boundary import boundary, function_name
from rollouts.dtypes import Prompt, StopReason, finite
from rollouts.errors import (
    ConfigError,
    Failure,
    GenerateFailure,
    RewardFailure,
    RolloutsError,
    TokenMismatchError,
    shortened,
)
from rollouts.training.config import RolloutConfig
from rollouts.training.rewards.scoring import score
from rollouts.training.types import Sample, Status

__all__ = ["attempt", "ends", "is_lost", "number_sample", "pack_lossy", "pack_or_fail", "share_rewards"]

_CLEANING_SECONDS = 300.0
"""How long a generate function that overran may hide its cleaning up behind shields: environments are closed there."""

_LOST = (Status.FAILED, Status.ABORTED)
"""A rollout that ended so is tried again; for good, it costs its group."""


async def attempt(config: RolloutConfig, request: Prompt, log: TurnLog | None) -> list[Sample]:
    """Generate and score once.

    Args:
        config: its ``generate_fn``, its ``reward_fn`` unless that scores groups, and their deadlines are used.
        request: with ``group_index`` and ``index``.
        log: where turns are kept.

    Raises:
        ConfigError: no rollout could survive what is wrong.
        TokenMismatchError: a law is broken.
    """
    samples: list[Sample] = []
    try:
        samples = await _generated(config, request, log)
        if not config.group_rm and not is_lost(samples):
            for sample in ends(samples):
                await score(sample, config.reward_fn, seconds=config.reward_seconds)
            share_rewards(samples)
            pack_or_fail(samples, RewardFailure, f"after reward {function_name(config.reward_fn)}")
    except (TokenMismatchError, ConfigError):
        raise
    except RolloutsError as error:
        failure = Failure.of(error)
        samples = pack_lossy(samples) or [number_sample(Sample(prompt=request.prompt, label=request.label), request)]
        for sample in samples:
            sample.status, sample.failure = Status.FAILED, failure
    for sample in samples:
        if sample.status in _LOST and not isinstance(sample.failure, Failure):
            sample.failure = Failure.of(GenerateFailure(f"the rollout ended {sample.status.value}"))
    return samples


async def _generated(config: RolloutConfig, request: Prompt, log: TurnLog | None) -> list[Sample]:
    """Call the generate function for one rollout, and check what it gave."""
    name = f"generate_fn {function_name(config.generate_fn)}"
    with boundary(GenerateFailure, name, seconds=config.rollout_seconds, armed=False) as entered, keeping_turns(log):
        samples: Any = await entered.guarded(config.generate_fn([request]), grace=_CLEANING_SECONDS)
    if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
        raise GenerateFailure(f"{name}: got {shortened(samples)}; expected a list of one Sample (more where it forks)")
    if len({id(sample) for sample in samples}) < len(samples):
        raise GenerateFailure(f"{name}: got {shortened(samples)}; expected a new Sample for each branch")
    for sample in samples:
        if sample.index not in (None, request.index):
            raise GenerateFailure(f"{name}: got {sample!r}; expected a new Sample for rollout {request.index}")
        number_sample(sample, request)
    pack_or_fail(samples, GenerateFailure, name)
    return list(samples)


def is_lost(samples: Sequence[Sample]) -> bool:
    """Whether the rollout is to be tried again."""
    return any(sample.status in _LOST for sample in samples)


def ends(samples: Sequence[Sample]) -> list[Sample]:
    """Those that a reward can see the end of: not the branches that were left where a history was rewritten."""
    return [sample for sample in samples if sample.stop_reason is not StopReason.FORKED]


def share_rewards(samples: Sequence[Sample]) -> None:
    """A branch that was left has the reward of the one that the rollout ended in."""
    for left, following in reversed(list(itertools.pairwise(samples))):
        if left.stop_reason is StopReason.FORKED:
            left.reward = following.reward


def number_sample(sample: Sample, request: Prompt) -> Sample:
    """The sample with the numbers of its rollout."""
    sample.group_index, sample.index, sample.rollout_id = request.group_index, request.index, request.index
    return sample


def pack_or_fail(samples: Sequence[Sample], failure: type[RolloutsError], source: str) -> None:
    """Check samples that foreign code had in hand, and hold them packed; what does not pack is its failure."""
    for sample in samples:
        try:
            _packed(sample)
        except ConfigError as error:
            raise failure(f"{source}: {error}") from error


def pack_lossy(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of something that failed, for the record: columns that do not pack are emptied."""
    for sample in samples:
        try:
            _packed(sample)
        except ConfigError:
            sample.tokens, sample.loss_mask, sample.rollout_log_probs = [], [], None
            sample.versions, sample.completions, sample.metrics, sample.step_rewards = [], [], {}, []
    return list(samples)


def _packed(sample: Sample) -> None:
    """Pack it, and see that its numbers are some that a file can hold: in JSON, NaN would come back as nothing."""
    sample.pack()
    rewards: Any = sample.step_rewards
    if not isinstance(rewards, Sequence) or any(finite(reward) is None for reward in rewards):
        raise ConfigError.of("Sample.step_rewards", rewards, "a list of finite numbers")
    for name, value in sample.metrics.items():
        if finite(value) is None:
            raise ConfigError.of(f"Sample.metrics[{name!r}]", value, "a finite number")
