"""Execution of one group: generate its rollouts, score them, apply the filter.

It enforces, for one group: a sound group has exactly ``n_samples_per_prompt`` rollouts of one prompt. A bad rollout is
data: an exception of a user's function becomes a sample with status FAILED and its ``failure``, which is retried or
replaced according to the config, and recorded with its group. If the group's reward or filter raises, all its samples
get the ``failure`` and keep their status. A broken law propagates.

This module does not know where prompts come from, how groups are used, or other groups.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import anyio
import attrs

from rollouts.concurrency.boundary import boundary, call_foreign, function_name, is_cancelled
from rollouts.concurrency.deadlines import deadline
from rollouts.concurrency.fair_turns import FairTurns
from rollouts.concurrency.times import Span
from rollouts.dtypes import Prompt
from rollouts.errors import (
    ConfigError,
    EndpointAway,
    Failure,
    FilterFailure,
    GenerateFailure,
    RewardFailure,
    RolloutsError,
    TokenMismatchError,
    at,
    shortened,
)
from rollouts.training.config import RolloutConfig
from rollouts.training.failures import FailurePolicy, FailureStats, cause_of
from rollouts.training.ledger import group_index
from rollouts.training.rollout_attempt import (
    attempt,
    ends,
    is_lost,
    number_sample,
    share_rewards,
    without_own_cancellation,
)
from rollouts.training.rollout_log import RolloutLog
from rollouts.training.sample_validator import unchanged
from rollouts.training.scoring import score_group
from rollouts.training.slots import Slots
from rollouts.training.types import FilterFn, Group, Outcome, Sample, Status

__all__ = ["GroupRunner"]


@attrs.define(eq=False)
class _Round:
    """The rollouts of a group that are admitted together: all that are missing, then replacements of lost ones."""

    prompt: Prompt
    limit: deadline
    """Deadline of the group."""
    finished: dict[int, list[Sample]]
    """Sound rollouts by number, those of earlier rounds included."""
    ended: list[int]
    """Their numbers. ``Prompt.urgency`` is bound to this list and not to ``finished``: a prompt that is pickled for a
    worker takes along what its urgency is bound to, which would be all samples of the group."""
    lost: dict[int, list[Sample]] = attrs.field(factory=dict)
    broken: Exception | None = None
    """The first broken law."""


class GroupRunner:
    """Runs the groups of one run, any number concurrently.

    Args:
        config: sizes, functions, deadlines and failure policies.
        failures: counts sound and lost attempts.
        rollout_log: records turns, lost attempts and finished rollouts before they count.
        attempts: number of failed attempts by rollout index; updated in place.
        is_needed: whether the batch needs this group, which ``keep_when_insufficient`` of a filter's result refers to.
        slots: admits rollouts; a rollout keeps its slot while it is retried, and a replacement takes another;
            ``None`` where none is generated.
    """

    def __init__(
        self,
        config: RolloutConfig,
        failures: FailureStats,
        rollout_log: RolloutLog | None,
        attempts: dict[int, int],
        is_needed: Callable[[], bool],
        slots: Slots | None = None,
    ) -> None:
        self.config = config
        self.failures = failures
        self._rollout_log = rollout_log
        self._attempts = attempts
        self._is_needed = is_needed
        self._slots = Slots(None) if slots is None else slots
        self._turns = FairTurns()
        self._rng = random.Random()

    async def run(self, prompt: Prompt, finished: dict[int, list[Sample]]) -> Group:
        """Generate, score and filter one group; ``finished`` contains finished rollouts by number, and is added to."""
        lost: dict[int, list[Sample]] = {}
        index = group_index(prompt)
        with deadline(self.config.group_seconds) as limit:
            for replacement in itertools.count():
                task = prompt if replacement == prompt.replacement else attrs.evolve(prompt, replacement=replacement)
                this_round = _Round(task, limit, finished, [*finished])
                missing = self._missing(finished)
                self._slots.reserve(index, len(missing))
                await self._run_round(this_round, missing)
                lost = this_round.lost
                if not lost or not self._may_replace(lost, len(finished), replacement):
                    break
                self.failures.replaced += len(lost)
        self._slots.reserve(index, 0)  # gives up the slots of rollouts that were cancelled before they asked
        if limit.caught:
            lost = this_round.lost | self._timed_out(prompt, finished | this_round.lost)
        elif not lost and len(finished) != self.config.n_samples_per_prompt:
            raise TokenMismatchError(f"group {prompt.group_index} ended with rollouts {sorted(finished)} only")
        rollouts = finished | lost
        samples = tuple(sample for number in sorted(rollouts) for sample in rollouts[number])
        if lost:
            reason = next(sample.failure for sample in next(iter(lost.values())) if sample.failure)
            return Group(prompt, samples, "failed", f"{reason.kind}: {reason.message}")
        return await self.score_and_filter(prompt, samples)

    async def _run_round(self, this_round: _Round, missing: Sequence[int]) -> None:
        """Run the missing rollouts; raise the first broken law, also if the group was cancelled after it."""
        try:
            if len(missing) == 1:  # needs no separate task
                await self._run_rollout(this_round, missing[0], None)
            else:
                async with anyio.create_task_group() as tasks:
                    for number in missing:
                        tasks.start_soon(self._run_rollout, this_round, number, tasks.cancel_scope.cancel)
        finally:
            if this_round.broken is not None:
                raise this_round.broken

    def _timed_out(self, prompt: Prompt, ended: Mapping[int, object]) -> dict[int, list[Sample]]:
        """Create a lost rollout for each rollout that the group's deadline cancelled."""
        lost: dict[int, list[Sample]] = {}
        for number in self._missing(ended):
            error = GenerateFailure(f"the group was not finished within {self.config.group_seconds:g} s")
            error.late = True
            request = self._request(prompt, number)
            sample = number_sample(Sample(prompt=prompt.prompt, label=prompt.label, status=Status.FAILED), request)
            sample.failure = Failure.of(error)
            self.failures.add([sample], sound=False)
            lost[number] = [sample]
        return lost

    def _missing(self, finished: Mapping[int, object]) -> list[int]:
        return [number for number in range(self.config.n_samples_per_prompt) if number not in finished]

    def _request(self, prompt: Prompt, number: int, ended: Sized = ()) -> Prompt:
        index = group_index(prompt) * self.config.n_samples_per_prompt + number
        return attrs.evolve(prompt, index=index, urgency=prompt.urgency or ended.__len__)

    def _may_replace(self, lost: Mapping[int, Sequence[Sample]], sound: int, replacement: int) -> bool:
        """Whether the failure policies allow replacing the lost rollouts of a group with ``sound`` sound ones."""
        policies = [self.config.policy_for(cause_of(samples)) for samples in lost.values()]
        return all(replacement < policy.replacements and sound >= policy.min_sound for policy in policies)

    async def score_and_filter(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group:
        """Score the samples of a sound group if ``group_rm`` is set, and apply the filter."""
        from rollouts.training.failed_samples import pack_lossy  # before a failure that leaves no file to open

        config = self.config
        outcome: Outcome = "kept"
        reason = ""
        try:
            if config.group_rm and config.reward_fn is not None:
                name = f"group reward {function_name(config.reward_fn)}"
                with unchanged(samples, RewardFailure, name):
                    async with without_own_cancellation(RewardFailure, f"the group in {name}"):
                        await score_group(ends(samples), config.reward_fn, seconds=config.reward_seconds)
                        share_rewards(samples)
            if config.filter_fn is not None:
                name = f"filter {function_name(config.filter_fn)}"
                with unchanged(samples, FilterFailure, name):
                    async with without_own_cancellation(FilterFailure, f"the group in {name}"):
                        kept, why = await self._apply_filter(config.filter_fn, samples, name)
                if not kept:
                    outcome, reason = "dropped", why
        except (TokenMismatchError, ConfigError, EndpointAway):
            raise
        except RolloutsError as error:
            failure = Failure.of(error)
            for sample in pack_lossy(samples, prompt):
                sample.failure = failure
            outcome, reason = "failed", f"{failure.kind}: {failure.message}"
        return Group(prompt, samples, outcome, reason)

    async def _apply_filter(self, filter_fn: FilterFn, samples: Sequence[Sample], name: str) -> tuple[bool, str]:
        """Return whether the filter keeps the group, and the reason: the filter's answer, else its name.

        A filter returns a bool, or an object with ``keep`` and optionally ``reason`` and ``keep_when_insufficient``,
        which keeps a group that the batch needs.
        """
        seconds = self.config.filter_seconds
        answer: Any = await call_foreign(FilterFailure, name, filter_fn, list(samples), seconds=seconds)
        with boundary(FilterFailure, name):
            keep: Any = getattr(answer, "keep", answer)
            keep = keep.item() if hasattr(keep, "item") else keep  # a NumPy or torch scalar
            reason = str(getattr(answer, "reason", None) or function_name(filter_fn))
            if keep is False and getattr(answer, "keep_when_insufficient", False):
                keep = self._is_needed()
        if not isinstance(keep, bool):
            raise FilterFailure(f"{name}: got {shortened(answer)}; expected True or False")
        return keep, reason

    async def _run_rollout(self, this_round: _Round, number: int, cancel_siblings: Callable[[], None] | None) -> None:
        """Run one rollout in a slot; cancel its siblings, if it has any, once the group can no longer become sound."""
        request = self._request(this_round.prompt, number, this_round.ended)
        index = request.index
        assert index is not None
        try:
            with at(f"group {request.group_index} · sample {number}"):
                await self._turns.passed()  # many groups may start in one turn of the event loop
                wait = await self._slots.acquire(group_index(request), number, this_round.limit)
                try:
                    samples, policy = await self._attempts_at(request, index, wait)
                finally:
                    self._slots.release()
        except Exception as error:  # noqa: BLE001 - a broken law: run raises it, without an exception group
            this_round.broken = this_round.broken or error
        except asyncio.CancelledError:
            if cancel_siblings is None or not is_cancelled():
                raise
            return  # its scope is cancelled anyway, and anyio 4 would keep the error in a cycle with all its frames
        else:
            if policy is None:
                this_round.finished[number] = samples
                this_round.ended.append(number)
            else:
                this_round.lost[number] = samples
        finally:
            self._attempts.pop(index, None)
        possible = self.config.n_samples_per_prompt - len(this_round.lost)
        hopeless = this_round.lost and not self._may_replace(this_round.lost, possible, this_round.prompt.replacement)
        if cancel_siblings is not None and (this_round.broken or hopeless):
            cancel_siblings()

    async def _attempts_at(
        self, request: Prompt, index: int, wait: Span | None
    ) -> tuple[list[Sample], FailurePolicy | None]:
        """Run one rollout with its retries; return it, and the policy of its failure if it is lost for good."""
        for tried in itertools.count(self._attempts.get(index, 0) + 1):
            if self._rollout_log is not None:
                request = attrs.evolve(request, turn_log=self._rollout_log.turn_log(index))
            samples = await attempt(self.config, request)
            policy = self._count_attempt(samples, index, tried)
            if policy is None or tried >= (policy.attempts or 1):  # policy_for sets it
                break
            if policy.backoff_seconds:
                with boundary(RolloutsError, f"the pause after {cause_of(samples)}", kind="a_pause"):
                    await anyio.sleep(policy.pause(tried, self._rng))
        if wait is not None:
            samples[0].times = samples[0].times.after(wait)
        if policy is None and self._rollout_log is not None:
            await self._rollout_log.finished(samples)
        return samples, policy

    def _count_attempt(self, samples: Sequence[Sample], index: int, tried: int) -> FailurePolicy | None:
        """Count an attempt and record a lost one; return the policy of its failure, ``None`` if it is sound."""
        sound = not is_lost(samples)
        self.failures.add(samples, sound=sound)
        for sample in samples:
            sample.metrics["attempts"] = tried
        if sound:
            return None
        self._attempts[index] = tried
        if self._rollout_log is not None:
            self._rollout_log.attempt_lost(index, tried, samples)
        return self.config.policy_for(cause_of(samples))
