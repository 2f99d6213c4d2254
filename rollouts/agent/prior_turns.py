"""The turns of an earlier rollout that an episode continues."""

from __future__ import annotations

from typing import Literal

import attrs

from rollouts.dtypes import Message
from rollouts.trajectory import Trajectory

__all__ = ["PriorTurns"]


@attrs.frozen
class PriorTurns:
    """A conversation to continue."""

    trajectory: Trajectory
    """Its tokens and messages, not sealed. The last message is the last reply, unless ``state`` is ``"asked"``."""
    reply_start: int
    """Position of the first token of the last reply's turn."""
    new: tuple[Message, ...] = ()
    """Messages to append after that reply; if there are none, ``state`` decides what comes next."""
    state: Literal["replied", "cut", "asked"] = "replied"
    """``replied``: the environment answers the last reply. ``cut``: the model continues the last reply. ``asked``: the
    tokens after the last reply are in the trajectory already, and the model replies to them."""
    part_start: int | None = None
    """In a turn that the environment continued, the position after its last text; else ``None``."""
    aborted: bool = False
    """Whether an abort cut the last reply, so that the budget of the whole reply is left for the rest of it."""
