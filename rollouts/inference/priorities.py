"""Priorities of the requests of one rollout, for servers that schedule by priority.

Invariant: a level is 0 for an evaluation, else from 1 to 4. It rises as the rollouts of its group finish: the last ones
come first, because a batch waits for whole groups. The levels differ by less than the threshold at which SGLang takes a
running request out of its batch (10, SGLang 0.5.23). A server that does not say that it schedules by priority gets
none.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import attrs

from rollouts.dtypes import Completion
from rollouts.errors import EndpointUnavailable
from rollouts.inference.base import CompletionRequest, PolicyWrapper, PriorityOrder, describe_as
from rollouts.inference.resumable import InterruptiblePolicy
from rollouts.inference.routing import Workers
from rollouts.inference.servers import ServerProtocol

__all__ = ["AgreedOrder", "RolloutPriority", "behind_training"]

_LOG = logging.getLogger(__name__)
_HIGHEST = 4
_NOT_SENT = "Endpoint.priority: no priorities are sent, since the servers do not say that they schedule by them"


class AgreedOrder:
    """How all servers schedule by priority, asked once; ``None``, with a warning, if one does not, or does not say."""

    def __init__(
        self, protocol: ServerProtocol, workers: Workers, wait: Callable[[EndpointUnavailable], Awaitable[object]]
    ) -> None:
        self._protocol, self._workers, self._wait = protocol, workers, wait
        self._orders: set[PriorityOrder | None] = set()
        self._asking = anyio.Lock()

    async def __call__(self) -> PriorityOrder | None:
        """The order.

        Raises:
            EndpointError: as ``describe`` of the policy, after the wait for a server.
        """
        async with self._asking:
            while not self._orders:
                try:
                    found = {await self._protocol.priority_order(worker) for worker in self._workers.all}
                except EndpointUnavailable as error:
                    await self._wait(error)
                    continue
                if None in found or len(found) != 1:
                    found = {None}
                    _LOG.warning(_NOT_SENT)
                self._orders = found
        return next(iter(self._orders))


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
