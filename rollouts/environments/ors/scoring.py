"""A group's rewards from the environment itself, which compares the rollouts of one task.

Invariant: one number for each rollout, in order, or an error; never a made-up score. It reads of a sample only its
conversation and its task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollouts.dtypes import Prompt
from rollouts.environments.ors.client import ORSServer, ORSTask
from rollouts.environments.ors.wire import ORSError, blocks_of

__all__ = ["GroupScore"]

_PLAIN = ("text", "image")


class Conversation(Protocol):
    """What is read of a sample."""

    messages: list[dict[str, Any]]
    metadata: Any


class GroupScore:
    """``score_group`` of an ORS environment as a ``reward_fn`` for ``RolloutConfig(group_rm=True)``.

    Args:
        server: where the environment is; the task stands in the samples' metadata.
    """

    def __init__(self, server: ORSServer) -> None:
        self.server = server

    async def __call__(self, samples: Sequence[Conversation]) -> list[float]:
        """The scores of a group.

        Raises:
            ORSError: the environment does not score groups, or fails to.
        """
        first: Mapping[str, Any] = samples[0].metadata
        session = await self.server.session(ORSTask.of(Prompt("", metadata=first)))
        try:
            listing = await session.listing()
            if not listing.supports_score_group:
                raise ORSError(f"{self.server!r} does not score groups")
            allowed = listing.message_block_types or _PLAIN
            return await session.score_group([_replies(sample.messages, allowed) for sample in samples])
        finally:
            await session.close()


def _replies(messages: Sequence[Mapping[str, Any]], allowed: Sequence[str]) -> list[dict[str, Any]]:
    """What came of the prompt: from the first reply on."""
    first = next((place for place, chat in enumerate(messages) if chat["role"] == "assistant"), len(messages))
    return blocks_of(messages[first:], allowed)
