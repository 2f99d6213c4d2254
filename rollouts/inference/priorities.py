"""Priorities of the requests of one rollout, for servers that schedule by priority.

Invariant: a level is 0 for an evaluation, else from 1 to 4. It rises as the rollouts of its group finish: the last ones
come first, because a batch waits for whole groups. The levels differ by less than the threshold at which SGLang takes a
running request out of its batch (10, SGLang 0.5.23). A server that does not say that it schedules by priority gets
none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs

from rollouts.dtypes import Completion
from rollouts.inference.base import CompletionRequest, PolicyWrapper, PriorityOrder, describe_as
from rollouts.inference.resumable import InterruptiblePolicy

__all__ = ["RolloutPriority", "behind_training"]

_HIGHEST = 4


def behind_training() -> int:
    """The ``Prompt.urgency`` of an evaluation."""
    return -1


class RolloutPriority(PolicyWrapper):
    """The policy of one rollout, whose requests have priorities.

    Args:
        inner: the policy of the rollout.
        urgency: see :attr:`rollouts.dtypes.Prompt.urgency`.
        order: how the servers schedule by priority.
    """

    inner: InterruptiblePolicy

    def __init__(
        self,
        inner: InterruptiblePolicy,
        urgency: Callable[[], int],
        order: Callable[[], Awaitable[PriorityOrder | None]],
    ) -> None:
        super().__init__(inner)
        self._urgency = urgency
        self._order = order
        describe_as(self, inner)

    async def complete(self, request: CompletionRequest) -> Completion:
        order = await self._order()
        if order is not None:
            finished = self._urgency()
            level = 0 if finished < 0 else min(1 + finished.bit_length(), _HIGHEST)
            request = attrs.evolve(request, priority=level if order == "higher first" else -level)
        return await self.inner.complete(request)

    async def interrupt(self) -> None:
        await self.inner.interrupt()
