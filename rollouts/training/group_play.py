"""One group's play: generate its rollouts, score them, ask the filter.

Laws kept here, for one group: a group that is sound has exactly ``n_samples_per_prompt`` rollouts of one prompt, and a
bad rollout is data: what a user's function raises becomes a sample with status FAILED that says why, is tried again or
replaced as the config says, and is recorded with its group. A broken law goes through.

This module does not know where prompts come from, what becomes of the group, or that there are others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import attrs

from rollouts.dtypes import Prompt, StopReason
from rollouts.errors import (
    ConfigError,
    Failure,
    FilterFailure,
    GenerateFailure,
    RewardFailure,
    RolloutsError,
    TokenMismatchError,
    at,
    boundary,
    call_foreign,
    deadline,
    function_name,
    leashed,
    shortened,
)
from rollouts.training.config import RolloutConfig
from rollouts.training.failures import FailureBook, cause_of
from rollouts.training.ledger import Ledger
from rollouts.training.rewards import score, score_group
from rollouts.training.types import FilterFn, Group, Outcome, Sample, Status
from rollouts.turns import keeping_turns

__all__ = ["GroupPlayer"]

_CLEANING_SECONDS = 300.0
"""How long a generate function that overran may hide its cleaning up behind shields: environments are closed there."""


class GroupPlayer:
    """Plays groups of one run, any number at once.

    Args:
        config: what to do.
        failures: counts the attempts, sound and lost.
        ledger: is told of lost attempts and finished rollouts before they count, and keeps their turns.
        attempts: how many attempts of each rollout failed already, by its index; kept up to date.
        is_scarce: whether a batch could not be filled without the group that a filter is deciding on.
    """

    def __init__(
        self,
        config: RolloutConfig,
        failures: FailureBook,
        ledger: Ledger | None,
        attempts: dict[int, int],
        is_scarce: Callable[[], bool],
    ) -> None:
        self.config = config
        self.failures = failures
        self._ledger = ledger
        self._attempts = attempts
        self._is_scarce = is_scarce
        self._rng = random.Random()

    async def play(self, prompt: Prompt, finished: dict[int, list[Sample]]) -> Group:
        """Generate, score and filter one group; ``finished`` holds rollouts by number and is filled."""
        lost: dict[int, list[Sample]] = {}
        with deadline(self.config.group_seconds) as scope:
            for replacement in itertools.count():
                lost = await self._roll(attrs.evolve(prompt, replacement=replacement), finished)
                if not lost or not self._may_replace(lost, len(finished), replacement):
                    break
                self.failures.replaced += len(lost)
        if scope.cancelled_caught:
            lost = self._too_late(prompt, finished)
        elif not lost and len(finished) != self.config.n_samples_per_prompt:
            raise TokenMismatchError(f"group {prompt.group_index} ended with rollouts {sorted(finished)} only")
        every = finished | lost
        samples = tuple(sample for number in sorted(every) for sample in every[number])
        if lost:
            reason = next(sample.failure for sample in next(iter(lost.values())) if sample.failure)
            return Group(prompt, samples, "failed", f"{reason.kind}: {reason.message}")
        return await self._judge(prompt, samples)

    def _too_late(self, prompt: Prompt, finished: Mapping[int, object]) -> dict[int, list[Sample]]:
        """The rollouts that the group's deadline cut, as lost."""
        lost: dict[int, list[Sample]] = {}
        for number in range(self.config.n_samples_per_prompt):
            if number not in finished:
                error = GenerateFailure(f"the group was not finished within {self.config.group_seconds:g} s")
                error.what, error.late = "the group", True
                request = self._request(prompt, number)
                sample = _placed(Sample(prompt=prompt.prompt, label=prompt.label, status=Status.FAILED), request)
                sample.failure = Failure.of(error)
                self.failures.add([sample], sound=False)
                lost[number] = [sample]
        return lost

    def _request(self, prompt: Prompt, number: int) -> Prompt:
        assert prompt.group_index is not None, "the buffer numbers its prompts"
        return attrs.evolve(prompt, index=prompt.group_index * self.config.n_samples_per_prompt + number)

    def _may_replace(self, lost: Mapping[int, Sequence[Sample]], sound: int, replacement: int) -> bool:
        """Whether lost rollouts of a group of which so many are sound, or may yet be, are worth another one each."""
        handlings = [self.config.handling(cause_of(samples)) for samples in lost.values()]
        return all(replacement < handling.replacements and sound >= handling.min_sound for handling in handlings)

    async def _roll(self, prompt: Prompt, finished: dict[int, list[Sample]]) -> dict[int, list[Sample]]:
        """Play the rollouts that are not finished; gives those that were lost."""
        lost: dict[int, list[Sample]] = {}
        broken: list[Exception] = []
        async with anyio.create_task_group() as rollouts:

            async def run(number: int) -> None:
                try:
                    samples, sound = await self._run_rollout(prompt, number)
                except Exception as error:  # noqa: BLE001 - a broken law, raised below without an exception group
                    broken.append(error)
                else:
                    (finished if sound else lost)[number] = samples
                possible = self.config.n_samples_per_prompt - len(lost)
                if broken or (lost and not self._may_replace(lost, possible, prompt.replacement)):
                    rollouts.cancel_scope.cancel()  # the group is lost: its siblings need not go on

            for number in range(self.config.n_samples_per_prompt):
                if number not in finished:
                    rollouts.start_soon(run, number)
        if broken:
            raise broken[0]
        return lost

    async def _judge(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group:
        """Score the group where it is scored whole, and ask the filter."""
        config = self.config
        outcome: Outcome = "kept"
        reason = ""
        try:
            if config.group_rm and config.reward_fn is not None:
                await score_group(_ends(samples), config.reward_fn, seconds=config.reward_seconds)
                _share_rewards(samples)
            if config.filter_fn is not None:
                kept, why = await self._ask_filter(config.filter_fn, samples)
                if not kept:
                    outcome, reason = "dropped", why
            _pack(samples, GenerateFailure, "after reward and filter")
        except (TokenMismatchError, ConfigError):
            raise
        except RolloutsError as error:
            failure = Failure.of(error)
            for sample in _salvaged(samples):
                sample.failure = failure
            outcome, reason = "failed", f"{failure.kind}: {failure.message}"
        return Group(prompt, samples, outcome, reason)

    async def _ask_filter(self, filter_fn: FilterFn, samples: Sequence[Sample]) -> tuple[bool, str]:
        """The filter's answer, and why it dropped the group: its own reason where it gives one, else its name.

        A bool, or an object with ``keep`` and perhaps ``reason`` and ``keep_when_insufficient``, which keeps a group
        that a batch could not be filled without.
        """
        name = f"filter {function_name(filter_fn)}"
        seconds = self.config.filter_seconds
        answer: Any = await call_foreign(FilterFailure, name, filter_fn, list(samples), seconds=seconds)
        with boundary(FilterFailure, name):
            keep: Any = getattr(answer, "keep", answer)
            keep = keep.item() if hasattr(keep, "item") else keep  # a NumPy or torch scalar
            reason = str(getattr(answer, "reason", None) or function_name(filter_fn))
            if keep is False and getattr(answer, "keep_when_insufficient", False):
                keep = self._is_scarce()
        if not isinstance(keep, bool):
            raise FilterFailure(f"{name}: got {shortened(answer)}; expected True or False")
        return keep, reason

    async def _run_rollout(self, prompt: Prompt, number: int) -> tuple[list[Sample], bool]:
        """One member of a group, with its attempts: its samples, and whether they are sound."""
        request = self._request(prompt, number)
        assert request.index is not None
        with at(f"group {prompt.group_index} · sample {number}"):
            try:
                samples, sound = await self._try_until_sound(request, request.index)
            finally:
                self._attempts.pop(request.index, None)
            if sound and self._ledger is not None:
                await self._ledger.finished(samples)
        return samples, sound

    async def _try_until_sound(self, request: Prompt, index: int) -> tuple[list[Sample], bool]:
        for attempt in itertools.count(self._attempts.get(index, 0) + 1):
            samples = await self._attempt(request)
            sound = not _is_lost(samples)
            self.failures.add(samples, sound=sound)
            for sample in samples:
                sample.metrics["attempts"] = attempt
            if sound:
                break
            self._attempts[index] = attempt
            if self._ledger is not None:
                self._ledger.attempt_lost(index, attempt, samples)
            handling = self.config.handling(cause_of(samples))
            if attempt >= (handling.attempts or 1):
                break
            if handling.backoff_seconds:
                with boundary(RolloutsError, f"the pause after {cause_of(samples)}"):
                    await anyio.sleep(handling.pause(attempt, self._rng))
        return samples, sound

    async def _attempt(self, request: Prompt) -> list[Sample]:
        """Generate and score once; a failure is a sample with status FAILED that says why."""
        samples: list[Sample] = []
        try:
            samples = await self._generate(request)
            if not self.config.group_rm and not _is_lost(samples):
                for sample in _ends(samples):
                    await score(sample, self.config.reward_fn, seconds=self.config.reward_seconds)
                _share_rewards(samples)
                _pack(samples, RewardFailure, f"after reward {function_name(self.config.reward_fn)}")
        except (TokenMismatchError, ConfigError):
            raise
        except RolloutsError as error:
            failure = Failure.of(error)
            samples = _salvaged(samples) or [_placed(Sample(prompt=request.prompt, label=request.label), request)]
            for sample in samples:
                sample.status, sample.failure = Status.FAILED, failure
        for sample in samples:
            if sample.status in _LOST and not isinstance(sample.failure, Failure):
                sample.failure = Failure.of(GenerateFailure(f"the rollout ended {sample.status.value}"))
        return samples

    async def _generate(self, request: Prompt) -> list[Sample]:
        """Call the generate function for one rollout, and check what it gave."""
        name = f"generate_fn {function_name(self.config.generate_fn)}"
        assert request.index is not None
        log = self._ledger.turn_log(request.index) if self._ledger is not None else None
        with boundary(GenerateFailure, name, seconds=self.config.rollout_seconds) as scope, keeping_turns(log):
            awaitable = self.config.generate_fn([request])
            samples: Any = await leashed(awaitable, scope, name, grace=_CLEANING_SECONDS)
        if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
            raise GenerateFailure(
                f"{name}: got {shortened(samples)}; expected a list of one Sample (more where it forks)"
            )
        if len({id(sample) for sample in samples}) < len(samples):
            raise GenerateFailure(f"{name}: got {shortened(samples)}; expected a new Sample for each branch")
        for sample in samples:
            if sample.index not in (None, request.index):
                raise GenerateFailure(f"{name}: got {sample!r}; expected a new Sample for rollout {request.index}")
            _placed(sample, request)
        _pack(samples, GenerateFailure, name)
        return list(samples)


_LOST = (Status.FAILED, Status.ABORTED)
"""A rollout that ended so is tried again; for good, it costs its group."""


def _is_lost(samples: Sequence[Sample]) -> bool:
    return any(sample.status in _LOST for sample in samples)


def _ends(samples: Sequence[Sample]) -> list[Sample]:
    """Those that a reward can see the end of: not the branches that were left where a history was rewritten."""
    return [sample for sample in samples if sample.stop_reason is not StopReason.FORKED]


def _share_rewards(samples: Sequence[Sample]) -> None:
    """A branch that was left has the reward of the one that the rollout ended in."""
    for left, following in reversed(list(itertools.pairwise(samples))):
        if left.stop_reason is StopReason.FORKED:
            left.reward = following.reward


def _placed(sample: Sample, request: Prompt) -> Sample:
    sample.group_index, sample.index, sample.rollout_id = request.group_index, request.index, request.index
    return sample


def _pack(samples: Sequence[Sample], failure: type[RolloutsError], source: str) -> None:
    """Check samples that foreign code had in hand, and hold them packed; what does not pack is its failure."""
    for sample in samples:
        try:
            sample.pack()
        except ConfigError as error:
            raise failure(f"{source}: {error}") from error


def _salvaged(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of something that failed, for the record: columns that do not pack are emptied."""
    for sample in samples:
        try:
            sample.pack()
        except ConfigError:
            sample.tokens, sample.loss_mask, sample.rollout_log_probs = [], [], None
            sample.versions, sample.calls, sample.metrics = [], [], {}
    return list(samples)
