"""The turns of a play in the log of its rollout, by conversation; also the turns that an earlier process logged.

Invariant: a kept reply is given out only to the same messages in the same place of the same conversation; anything else
is a divergence, after which the rollout begins again with an empty log. This module plays nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.agent.turn_log import Turn, TurnLog, message_to_dict, prompt_digest
from rollouts.base.stable_repr import in_order
from rollouts.base.storable import to_msgpack
from rollouts.dtypes import Message, Prompt
from rollouts.errors import GenerateFailure
from rollouts.trajectory import Trajectory

__all__ = ["Diverged", "PlayLog", "digest_of"]


class Diverged(GenerateFailure):
    """The play asks something else than the log contains; it begins again. Raised to end it, never stored."""


def digest_of(messages: Sequence[Message], *others: Any) -> str:
    """A checksum of messages, images by their hashes, and of other values."""
    values = [[message_to_dict(one) for one in messages], *map(in_order, others)]
    return hashlib.blake2b(to_msgpack(values), digest_size=12).hexdigest()


class PlayLog:
    """The log of one rollout.

    Args:
        log: that of the rollout's prompt, claimed; ``None`` where nothing is logged.
        prompt: turns of another prompt are not kept.
    """

    def __init__(self, log: TurnLog | None, prompt: Prompt) -> None:
        self._log = log
        self._prompt = prompt_digest(prompt)
        self._kept: dict[str, list[Turn]] = {}
        self.restarted = False
        """Whether turns of an earlier process were dropped."""
        self.fits = True
        """Whether the turns of an earlier process are those of such a play."""
        for turn in () if log is None else log.turns:
            key = turn.fields.get("conversation")
            self.fits = self.fits and isinstance(key, str) and turn.fields.get("prompt") == self._prompt
            self._kept.setdefault(str(key), []).append(turn)

    @property
    def logs(self) -> bool:
        """Whether turns are logged."""
        return self._log is not None

    def take(self, conversation: str) -> Sequence[Turn]:
        """The kept turns of a conversation, once."""
        return self._kept.pop(conversation, ())

    @property
    def untaken(self) -> bool:
        """Whether a conversation was kept that the play did not begin."""
        return bool(self._kept)

    async def drop(self) -> None:
        """Begin again: void the logged turns."""
        self._kept, self.restarted = {}, True
        if self._log is not None:
            await self._log.void()

    async def save(
        self, conversation: str, trajectory: Trajectory, logged: tuple[int, int, int, int], fields: Mapping[str, Any]
    ) -> tuple[int, int, int, int]:
        """Log what a trajectory has since ``logged``; return its numbers of tokens, completions, messages, times."""
        if self._log is not None:
            turn = Turn.since(trajectory, *logged, conversation=conversation, prompt=self._prompt, **fields)
            await self._log.save(turn)
        return len(trajectory), len(trajectory.completions), len(trajectory.messages), len(trajectory.times)
