"""One attempt at one rollout: generate, check, score.

Invariant: an exception of a user's function becomes a sample with status FAILED and its ``failure``; a broken law and a
config error of the generate function propagate. A rollout that cancels its task is lost; a cancellation by an enclosing
scope propagates. Returned samples are numbered and packed, and scored unless the rollout is lost. A reward does not
change their identity, and no two rollouts share lists or dicts of their prompt.

This module does not know groups, retries or the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import anyio.lowlevel
import attrs

from rollouts.concurrency.boundary import boundary, function_name, is_cancelled
from rollouts.dtypes import Prompt, StopReason
from rollouts.errors import (
    ConfigError,
    EndpointAway,
    Failure,
    GenerateFailure,
    RewardFailure,
    RolloutsError,
    TokenMismatchError,
    shortened,
)
from rollouts.training.config import RolloutConfig
from rollouts.training.sample_validator import copied, pack_or_fail, unchanged
from rollouts.training.scoring import score
from rollouts.training.types import Sample, Status

__all__ = ["attempt", "ends", "is_lost", "number_sample", "score_branches", "share_rewards", "without_own_cancellation"]

_CLEANING_SECONDS = 300.0
"""Grace period after the deadline of a generate function, for shielded cleanup such as closing environments."""

_LOST = (Status.FAILED, Status.ABORTED)
"""Statuses of a lost rollout: it is tried again, and fails its group when it is lost for good."""


async def attempt(config: RolloutConfig, request: Prompt) -> list[Sample]:
    """Generate a rollout and score it, once.

    Args:
        config: provides ``generate_fn``, ``reward_fn`` (unused with ``group_rm``) and their deadlines.
        request: a prompt with ``group_index`` and ``index``, and the log of its turns.

    Raises:
        ConfigError: every rollout would fail in the same way.
        EndpointAway: no server answered for too long; the rollout is not lost.
        TokenMismatchError: a law is broken.
    """
    from rollouts.training.failed_samples import failed_rollout  # before a failure that leaves no file to open

    samples: list[Sample] = []
    try:
        async with without_own_cancellation(GenerateFailure, "the rollout"):
            name = f"generate_fn {function_name(config.generate_fn)}"
            with boundary(GenerateFailure, name, seconds=config.rollout_seconds, armed=False) as entered:
                private = attrs.evolve(request, label=copied(request.label), metadata=copied(request.metadata))
                returned = await entered.guarded(config.generate_fn([private]), grace=_CLEANING_SECONDS)
            samples = _listed(returned, name)
            _check(samples, request, name)
            if not config.group_rm and not is_lost(samples):
                await score_branches(samples, config)
    except (TokenMismatchError, ConfigError, EndpointAway):
        raise
    except RolloutsError as error:
        numbered = [number_sample(sample, request) for sample in samples or [Sample()]]
        samples = failed_rollout(numbered, request, Failure.of(error))
    for sample in samples:
        if sample.status in _LOST and not isinstance(sample.failure, Failure):
            sample.failure = Failure.of(GenerateFailure(f"the rollout ended {sample.status.value}"))
    return samples


class without_own_cancellation(contextlib.AbstractAsyncContextManager[Any]):  # noqa: N801
    """Run user code; raise ``failure`` if it cancelled the task that runs it."""

    def __init__(self, failure: type[RolloutsError], what: str) -> None:
        task = asyncio.current_task()
        assert task is not None, "user code is awaited in a task"
        self._failure, self._what, self._task, self._before = failure, what, task, task.cancelling()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        task, before = self._task, self._before
        try:
            if error is None and task.cancelling() > before:
                await anyio.lowlevel.checkpoint()  # raises a cancellation that no await has raised yet
            if isinstance(error, asyncio.CancelledError):
                raise error
        except asyncio.CancelledError as cancelled:
            if is_cancelled() or task.cancelling() <= before:
                raise
            while task.cancelling() > before:
                task.uncancel()
            text = f"the task of {self._what} was cancelled, but not by one of its scopes"
            raise self._failure(f"{text}; expected no cancel() of current_task()") from cancelled
        finally:
            error = None  # its traceback refers to this frame: a cycle that only the collector would free


async def score_branches(samples: Sequence[Sample], config: RolloutConfig) -> None:
    """Score the samples of a rollout one by one, and check what the reward function may have changed."""
    name, no_code = f"reward {function_name(config.reward_fn)}", config.reward_fn is None
    with contextlib.nullcontext() if no_code else unchanged(samples, RewardFailure, name):
        for sample in ends(samples):
            await score(sample, config.reward_fn, seconds=config.reward_seconds)
        share_rewards(samples)


def _listed(samples: Any, name: str) -> list[Sample]:
    """The samples that the generate function returned for one rollout."""
    if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
        raise GenerateFailure(f"{name}: got {shortened(samples)}; expected a list of one Sample (more where it forks)")
    if len({id(sample) for sample in samples}) < len(samples):
        raise GenerateFailure(f"{name}: got {shortened(samples)}; expected a new Sample for each branch")
    return list(samples)


def _check(samples: Sequence[Sample], request: Prompt, name: str) -> None:
    """Check, number and pack the samples that the generate function returned for one rollout."""
    for sample in samples:
        own = sample.prompt is request.prompt and sample.label is request.label
        if not own or sample.index is not request.index or sample.group_index is not request.group_index:
            from rollouts.training.data_fields import check_data  # here: most samples have the prompt's own values

            check_data(sample, request, name)
        number_sample(sample, request)
    if samples[-1].stop_reason is StopReason.FORKED:
        expected = "as the last branch, which ended in a fork; expected the branch that continues"
        raise GenerateFailure(f"{name}: got {samples[-1]!r} {expected}")
    pack_or_fail(samples, GenerateFailure, name)
    if samples[0] is not samples[-1] or samples[0].parent is not None:
        from rollouts.training.branching import check_parents  # here: few rollouts have branches

        check_parents(samples, name)


def is_lost(samples: Sequence[Sample]) -> bool:
    """Whether the rollout failed or was aborted, so that it needs another attempt."""
    return any(sample.status in _LOST for sample in samples)  # a set would hash each status in Python


def ends(samples: Sequence[Sample]) -> list[Sample]:
    """The branches that a reward scores: all but the branches that ended in a fork, where the history was rewritten."""
    return [sample for sample in samples if sample.stop_reason is not StopReason.FORKED]


def share_rewards(samples: Sequence[Sample]) -> None:
    """Copy the reward of a rollout's last branch to the branches that ended in a fork."""
    for branch, following in reversed(list(itertools.pairwise(samples))):
        if branch.stop_reason is StopReason.FORKED:
            branch.reward = following.reward


def number_sample(sample: Sample, request: Prompt) -> Sample:
    """Set the sample's ``group_index``, ``index`` and ``rollout_id`` from the request, and return it."""
    sample.group_index, sample.index, sample.rollout_id = request.group_index, request.index, request.index
    return sample
