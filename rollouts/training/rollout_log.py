"""The protocol through which the scheduler reports events, for example to the journal of a run.

Invariant: the log has accepted a rollout or group before the manager counts it: ``finished`` and ``settled`` return
when the record is durable. The scheduler knows this protocol and no implementation of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rollouts.dtypes import Prompt
from rollouts.training.metrics import Accounting
from rollouts.training.types import Group, Sample

if TYPE_CHECKING:
    from rollouts.agent.turn_log import TurnLog

__all__ = ["RolloutLog"]


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
