"""The reports of the scheduler: the protocol of a log, such as the journal of a run, and the recorder that calls it.

Invariant: the log has accepted a rollout or group before the manager counts it: ``finished`` and ``settled`` return
when the record is durable. The scheduler knows this protocol and no implementation of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rollouts.concurrency.boundary import call_foreign, function_name
from rollouts.concurrency.deadlines import deadline
from rollouts.dtypes import Prompt
from rollouts.errors import RolloutsError
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.metrics import Accounting
from rollouts.training.types import Group, Sample

if TYPE_CHECKING:
    from rollouts.agent.turn_log import TurnLog

__all__ = ["OnGroup", "Recorder", "RolloutLog"]

OnGroup = Callable[[Group], None]

_RECORD_SECONDS = 60.0
"""Deadline of ``on_group`` for one settled group."""


class RolloutLog(Protocol):
    """Receives the events of a :class:`~rollouts.training.manager.AsyncRolloutManager` in order."""

    def taken(self, prompt: Prompt, position: int | None) -> None:
        """A prompt was taken from the buffer; a sampler chose it at this position in the data."""

    def turn_log(self, index: int) -> TurnLog:
        """Return the turn log of one attempt at the rollout ``index``, with turns stored by an earlier process."""
        ...

    def attempt_lost(self, index: int, attempt: int, samples: Sequence[Sample]) -> None:
        """Attempt number ``attempt`` at a rollout failed; its turns are discarded."""

    async def finished(self, samples: Sequence[Sample]) -> None:
        """A rollout is finished and scored; ``samples`` are its branches. Returns when the record is durable."""

    async def settled(self, group: Group, appended: Callable[[], None]) -> None:
        """A group has its outcome. Calls ``appended`` when the record has its place in the log, before any other event;
        returns when it is durable."""

    def sealed(self, number: int, groups: Sequence[int], metrics: Mapping[str, float], accounting: Accounting) -> None:
        """Batch ``number`` is handed to the caller."""


class Recorder:
    """Reports the events of groups to the log of a run, and settled groups to ``on_group``, where the run has them."""

    def __init__(self, log: RolloutLog | None, on_group: OnGroup | None, stop: Callable[[Exception], None]) -> None:
        self._log, self._on_group, self._stop = log, on_group, stop

    def taken(self, prompt: Prompt, data_buffer: DataBuffer) -> None:
        """Report that a prompt was taken from its buffer."""
        if self._log is not None:
            self._log.taken(prompt, data_buffer.position_of(prompt))

    async def settled(self, group: Group, appended: Callable[[], None] = lambda: None) -> None:
        """Report that a group has its outcome; ``appended`` is called as the log calls it. A cancellation waits."""
        if self._log is None:
            appended()
        else:
            with deadline(None, shield=True):
                await self._log.settled(group, appended)
        if self._on_group is not None:
            name, on_group, seconds = f"recording with {function_name(self._on_group)}", self._on_group, _RECORD_SECONDS
            try:
                await call_foreign(RolloutsError, name, on_group, group, seconds=seconds, kind="recording", shield=True)
            except RolloutsError as error:
                if self._log is None:
                    raise  # nothing has the group: it runs again
                self._stop(error)  # the log has it: it counts, and the run ends

    def sealed(
        self, number: int, groups: Sequence[Group], metrics: Mapping[str, float], accounting: Accounting
    ) -> None:
        """Report that a batch is handed to the caller."""
        if self._log is not None:
            self._log.sealed(number, [group.group_index for group in groups], metrics, accounting)
