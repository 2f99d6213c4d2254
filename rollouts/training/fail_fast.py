"""The rule that ends a run from which no batch can be expected, and the error with which it ends.

There are four cases, in this order:

1. :meth:`FailFast.stop` was called, e.g. for a broken law, or a rollout failed whose policy is ``then="stop"``.
2. All groups from the first on failed for the same cause, and at least one group's worth of rollouts did. While nothing
   has succeeded, no prompt is taken after the groups in flight.
3. ``failure_budget`` is used up.
4. ``patience`` groups in a row were rejected, by the filter or by a failure.

A batch that cannot be filled, in time or from the data, also ends with an error of this module; the run may continue.

Invariant: an error is reported once; the next call of the manager starts with full patience. This module decides, and
the manager raises. It does not know prompts, tasks or the buffer.
"""

from __future__ import annotations

from collections import Counter

from rollouts.concurrency.boundary import function_name
from rollouts.errors import DataExhausted, EndpointAway, FilterFailure, GenerateFailure
from rollouts.training.config import RolloutConfig
from rollouts.training.failures import FailureStats, same_cause
from rollouts.training.metrics import Accounting
from rollouts.training.rollout_attempt import is_lost
from rollouts.training.types import Group

__all__ = ["FailFast"]


class FailFast:
    """Watches the groups of one run.

    Args:
        config: policies of failures, patience and the size of a group.
        failures: the lost and sound attempts of the run.

    Attributes:
        any_success: whether a group was kept or dropped, or the first groups failed for different causes.
    """

    def __init__(self, config: RolloutConfig, failures: FailureStats) -> None:
        self.any_success = False
        self._config = config
        self._failures = failures
        self._error: Exception | None = None
        self._first_failed: list[Group] = []  # until any success
        self._rejected_in_a_row = 0
        self._failure_causes: Counter[str] = Counter()  # of the groups rejected in a row
        self._dropped_rewards: set[float | None] = set()  # of the groups rejected in a row

    def saw(self, group: Group) -> None:
        """Take note of the outcome of a group."""
        if group.outcome == "kept":
            self._reset_patience()
            self.any_success = True
            return
        self._rejected_in_a_row += 1
        if group.outcome == "dropped":
            self._dropped_rewards.update(group.rewards)
            self.any_success = True
            return
        self._failure_causes[group.reason] += 1
        if not self.any_success:
            self._first_failed.append(group)
        for failure in [sample.failure for sample in group.samples if sample.failure is not None]:
            if self._config.policy_for(failure.cause).then == "stop":
                self.stop(GenerateFailure(f"group {group.group_index} failed: {failure.kind}: {failure.message}"))

    def stop(self, error: Exception) -> None:
        """End the run with this error, unless an earlier one ends it."""
        self._error = self._error or error

    def begin_call(self) -> None:
        """Forget the failures of an earlier call that left no group in flight, and an outage, which may be over."""
        self._first_failed = []
        self._error = None if isinstance(self._error, EndpointAway) else self._error

    @property
    def may_run_ahead(self) -> bool:
        """Whether groups may start while the caller is not waiting for a batch."""
        return self._error is None and self._rejected_in_a_row < self._config.rejections_allowed

    @property
    def all_failed(self) -> bool:
        """Whether every group failed so far, and no attempt was sound or each group failed by its reward or filter."""
        if self.any_success or not self._first_failed:
            return False
        return not self._failures.sound or not any(is_lost(group.samples) for group in self._first_failed)

    def take_error(self) -> Exception | None:
        """Return the error of :meth:`stop`, and forget it."""
        error, self._error = self._error, None
        return error

    def verdict(self, accounting: Accounting, mean_reward: float | None) -> Exception | None:
        """Return the error with which the run ends, or ``None``.

        Args:
            accounting: the second case waits until no group is in flight; otherwise for the message.
            mean_reward: for the message.
        """
        return (
            self.take_error()
            or self._same_cause_from_the_first(accounting)
            or self._over_budget(accounting)
            or self._out_of_patience(accounting, mean_reward)
        )

    def out_of_time(self, accounting: Accounting) -> Exception:
        """Return the error of a batch that was not filled within ``batch_seconds``."""
        accepted = f"{accounting.ready} of {self._config.batch_size} groups were accepted"
        return GenerateFailure(f"{accepted} within {self._config.batch_seconds:g} s; they are kept; {accounting}")

    def out_of_data(self, accounting: Accounting, data: object) -> Exception:
        """Return the error of a batch for which ``data`` has too few prompts."""
        accepted = f"{accounting.ready} of {self._config.batch_size} groups are accepted"
        return DataExhausted(f"{accepted} and no prompt is left: {data!r}; {accounting}")

    def _same_cause_from_the_first(self, accounting: Accounting) -> Exception | None:
        if not self.all_failed or accounting.in_flight:
            return None
        samples = [sample for group in self._first_failed for sample in group.samples]
        if len({same_cause(sample.failure) for sample in samples if sample.failure is not None}) > 1:
            self.any_success = True  # there was none, but the causes differ: patience decides
            return None
        if max(self._failures.lost.total(), len(samples)) < self._config.n_samples_per_prompt:
            return None
        failed, self._first_failed = self._first_failed, []
        self._reset_patience()
        text = f"all groups failed alike, from the first on ({len(failed)}): {failed[0].reason}"
        return GenerateFailure(f"{text}. No further prompt was taken; {accounting}")

    def _over_budget(self, accounting: Accounting) -> Exception | None:
        exceeded = self._failures.overdrawn()
        return GenerateFailure(f"{exceeded}. {_kept(accounting)}") if exceeded else None

    def _out_of_patience(self, accounting: Accounting, mean_reward: float | None) -> Exception | None:
        count, failed = self._rejected_in_a_row, self._failure_causes.total()
        if count < self._config.rejections_allowed:
            return None
        causes = "; ".join(f"{number} × {cause}" for cause, number in self._failure_causes.most_common(3))
        rewards = set(self._dropped_rewards)
        self._reset_patience()
        if failed > count - failed:
            text = f"{failed} of the last {count} groups failed, none was accepted: {causes}"
            return GenerateFailure(f"{text}. {_kept(accounting)}")
        assert mean_reward is not None, "a filter sees scored groups"
        text = f"filter {function_name(self._config.filter_fn)} accepted none of the last {count} groups"
        if failed:
            text += f", and {failed} failed before it"
        if len(rewards) == 1:
            text += f"; every reward was {next(iter(rewards)):.4g}, so there is nothing to learn"
            text += ' (keep="all" of agent_recipe, in place of a filter, keeps such groups)'
        return FilterFailure(f"{text}; mean reward {mean_reward:.4g}. {_kept(accounting)}")

    def _reset_patience(self) -> None:
        self._rejected_in_a_row = 0
        self._failure_causes.clear()
        self._dropped_rewards.clear()


def _kept(accounting: Accounting) -> str:
    return f"{accounting.ready} accepted groups are kept; {accounting}"
