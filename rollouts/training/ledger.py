"""The accounting of one run: where each prompt is that was taken from the buffer, and the rollouts of its group.

Invariant: each method is one change of state. It updates the counts, the buffer and the ready groups together and never
waits, so that law 4 holds between any two calls. This module starts, records and judges nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import DataExhausted
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.metrics import Accounting, RunMetrics
from rollouts.training.types import Group, Sample

if TYPE_CHECKING:
    from rollouts.training.manager_state import ManagerState

__all__ = ["Ledger"]


@attrs.define(eq=False)
class Ledger:
    """The groups of one run by state, and their counts."""

    data_buffer: DataBuffer
    accounting: Accounting = attrs.field(factory=Accounting)
    totals: RunMetrics = attrs.field(factory=RunMetrics)
    ready: list[Group] = attrs.field(factory=list)
    """Accepted groups that are in no batch yet."""
    started: dict[int, int] = attrs.field(factory=dict)
    """Groups in flight by index, with the number of policy versions announced at their start."""
    restarted: set[int] = attrs.field(factory=set)
    """Groups in flight that were returned to the buffer before."""
    finished_rollouts: dict[int, dict[int, list[Sample]]] = attrs.field(factory=dict)
    """Finished rollouts of groups in flight or returned, by group index and number in the group."""
    failed_attempts: dict[int, int] = attrs.field(factory=dict)
    """Number of failed attempts at rollouts in flight, by index."""
    dropped_for_batch: int = 0
    """Groups that the filter dropped since the last batch."""
    not_replaced: int = 0
    """Groups since the last batch that :meth:`is_needed` gave up: no group starts in their place."""

    def take(self, version: int) -> Prompt | None:
        """Take a prompt, whose group is in flight from now on; ``None`` if no prompt is left."""
        try:
            (prompt,) = self.data_buffer.get_prompts(1)
        except DataExhausted:
            return None
        self.accounting.taken += 1
        self.accounting.in_flight += 1
        self.started[index := group_index(prompt)] = version
        if index in self.finished_rollouts:
            self.restarted.add(index)
        return prompt

    def account_for(self, group: Group) -> None:
        """Count a group in flight as ready, dropped or failed; :meth:`landed` follows when its task ends."""
        self.totals.add(group)
        self.accounting.in_flight -= 1
        if group.outcome == "kept":  # its prompt stays out until its batch is sealed: a state saved before has it
            self.accounting.ready += 1
            self.ready.append(group)
        else:
            self.data_buffer.mark_done(group.prompt)
            if group.outcome == "dropped":
                self.accounting.dropped += 1
                self.dropped_for_batch += 1
            else:
                self.accounting.failed += 1
        del self.finished_rollouts[group.group_index]

    def observe(self, group: Group) -> None:
        """Pass the rewards of a group in flight to the sampler; those of a failed group do not count."""
        if group.outcome != "failed" and self.data_buffer.sampler is not None:
            self.data_buffer.observe(group.prompt, group.rollout_rewards)

    def is_needed(self, spare: int) -> bool:
        """Decide whether the batch needs a group that the filter would else drop; call it once for each such group.

        A batch starts with ``spare`` groups more than its size. The first ``spare`` groups that the filter drops leave
        enough to fill it: until then the answer is false, and the group is dropped without another in its place.
        """
        if max(self.dropped_for_batch, self.not_replaced) >= spare:  # some given up are not counted as dropped yet
            return True
        self.not_replaced += 1
        return False

    def put_back(self, prompt: Prompt) -> None:
        """Return the prompt of a group in flight to the buffer; finished rollouts of the group are kept."""
        self.data_buffer.put_back([prompt])
        self.accounting.in_flight -= 1
        self.accounting.returned += 1

    def landed(self, prompt: Prompt) -> None:
        """Forget a group whose task has ended; it is accounted for, or its prompt was put back."""
        self.restarted.discard(index := group_index(prompt))
        del self.started[index]

    def drop_ready(self, groups: Collection[Group], reason: str) -> None:
        """Count ready groups as dropped."""
        self._remove_ready(groups)
        self.accounting.dropped += len(groups)
        self.totals.reasons[reason] += len(groups)

    def seal(self, groups: Collection[Group]) -> None:
        """Count ready groups as in a batch."""
        self._remove_ready(groups)
        self.accounting.in_batch += len(groups)
        self.accounting.check()
        self.dropped_for_batch = self.not_replaced = 0

    def _remove_ready(self, groups: Collection[Group]) -> None:
        for group in groups:
            self.data_buffer.mark_done(group.prompt)
        removed = {group.group_index for group in groups}
        self.ready = [group for group in self.ready if group.group_index not in removed]
        self.accounting.ready -= len(groups)

    def state(self, batches: int) -> dict[str, Any]:
        """Return the state of the ledger and its buffer as plain values."""
        from rollouts.training.manager_state import ManagerState  # here: most runs continue from their journal

        return ManagerState(
            accounting=attrs.evolve(self.accounting),
            batches=batches,
            ready={group.group_index: list(group.samples) for group in self.ready},
            finished=self.finished_rollouts,
            attempts=self.failed_attempts,
            totals=self.totals.to_dict(),
        ).to_dict(self.data_buffer)

    def restore(self, state: ManagerState) -> None:
        """Restore a state whose buffer is already restored."""
        self.accounting = state.accounting
        for number, samples in sorted(state.ready.items()):
            self.ready.append(Group(self.data_buffer.take_by_index(number), tuple(samples), "kept"))
        self.finished_rollouts = state.finished
        self.failed_attempts.update(state.attempts)
        self.totals.load(state.totals)
        self.accounting.check()


def group_index(prompt: Prompt) -> int:
    """The group index of a prompt that was taken from a buffer."""
    assert prompt.group_index is not None, "the buffer numbers its prompts"
    return prompt.group_index
