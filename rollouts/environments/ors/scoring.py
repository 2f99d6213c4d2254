"""Group rewards from the environment, which compares the rollouts of one task.

Invariant: one score for each rollout, in order, or an error, never a default score. It reads only the messages and
the metadata of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollouts.dtypes import Image, Prompt, with_images
from rollouts.environments.ors.client import ORSServer, ORSTask
from rollouts.environments.ors.wire import ORSError, blocks_of

__all__ = ["GroupScore"]

_PLAIN = ("text", "image")


class Conversation(Protocol):
    """The fields of a sample that are read."""

    messages: list[dict[str, Any]]
    metadata: Any
    named_images: Mapping[str, Image]


class GroupScore:
    """``score_group`` of an ORS environment as a ``reward_fn`` for ``RolloutConfig(group_rm=True)``.

    Args:
        server: the environment's server; the samples' metadata identifies the task.
    """

    def __init__(self, server: ORSServer) -> None:
        self.server = server

    async def __call__(self, samples: Sequence[Conversation]) -> list[float]:
        """The scores of a group.

        Raises:
            ORSError: the environment does not score groups, or scoring failed.
        """
        first: Mapping[str, Any] = samples[0].metadata
        session = await self.server.session(ORSTask.of(Prompt("", metadata=first)))
        try:
            listing = await session.listing()
            if not listing.supports_score_group:
                raise ORSError(f"{self.server!r} does not score groups")
            allowed = listing.message_block_types or _PLAIN
            return await session.score_group([_replies(sample, allowed) for sample in samples])
        finally:
            await session.close()


def _replies(sample: Conversation, allowed: Sequence[str]) -> list[dict[str, Any]]:
    """The messages from the first reply on, without the prompt."""
    messages = with_images(sample.messages, sample.named_images.__getitem__)
    first = next((index for index, chat in enumerate(messages) if chat["role"] == "assistant"), len(messages))
    return blocks_of(messages[first:], allowed)
