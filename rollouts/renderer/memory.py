"""A renderer's memory of one growing conversation, so that the cost of a bridge depends on the new messages only.

Invariant: each message is searched for switches once. Above some number of messages with switches, messages that no
probe depends on are dropped: the texts of the probes are equal with and without them. This module does not know
token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.dtypes import Message
from rollouts.renderer.bridge import Kept, is_system
from rollouts.renderer.special_text import Marks
from rollouts.renderer.switches import Switches

__all__ = ["BridgeMemory"]

_KEPT = 4
"""Number of messages with switches that are kept whatever their effect."""


class BridgeMemory:
    """The messages that the bridges of one conversation depend on, and the choice of bridges to compare.

    It serves one renderer and one list of messages that only grows; with another list, it starts again. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self.bridges = 0
        """Number of bridges behind a dummy so far."""
        self._start(())

    def _start(self, history: Sequence[Message]) -> None:
        self._history = history
        self._read = 0
        self._system: list[Message] = []
        self._kept: list[tuple[int, Message]] = []
        self._max_kept = _KEPT
        self._last_user: int | None = None
        self._results: tuple[Message, ...] = ()
        self._patterns: set[tuple[str, ...]] = set()
        self._switches_seen = 0
        self._again = False

    @property
    def compares_next(self) -> bool:
        """Whether the next bridge is compared with the whole rendering because of its number: 1, 2, 4, 8, …"""
        return (self.bridges + 1).bit_count() == 1

    def read(self, history: Sequence[Message], switches: Switches, marks: Marks) -> Kept:
        """Read the messages since the last bridge, without the reply; return the messages that the dummy needs."""
        starts = history is not self._history or len(history) <= self._read
        if starts:
            self._start(history)
        for position in range(self._read, len(history) - 1):
            self._note(position, history[position], switches, marks)
        self._read = max(len(history) - 1, 0)
        if starts:
            self._switches_seen = len(self._kept)
            replies = (at for at in reversed(range(self._read)) if history[at].role == "assistant")
            self._again = bool(self._kept) and self._kept[-1][0] >= next(replies, 0)
        if len(self._kept) > self._max_kept:
            self._drop_those_without_effect(switches)
        return self._dummy(self._kept)

    def _note(self, position: int, message: Message, switches: Switches, marks: Marks) -> None:
        if is_system(message) and len(self._system) == position:
            self._system.append(message)
            return
        if message.role == "user":
            self._last_user = position
        elif message.role == "tool" and not self._results:
            self._results = (message,)
        if switches.texts:
            (message,) = marks.guarded([message])
            pattern = switches.found(message)
            if pattern:
                self._kept.append((position, message))
                self._patterns.add(pattern)

    def _dummy(self, kept: Sequence[tuple[int, Message]]) -> Kept:
        return Kept(tuple(kept), self._last_user, self._results)

    def _drop_those_without_effect(self, switches: Switches) -> None:
        def texts(kept: Sequence[tuple[int, Message]]) -> list[str | None]:
            return switches.probes(self._system, self._dummy(kept))

        before = texts(self._kept)
        if texts(self._kept[-1:]) == before:
            self._kept = self._kept[-1:]
        for one in list(self._kept[:-1]):
            fewer = [other for other in self._kept if other is not one]
            if texts(fewer) == before:
                self._kept = fewer
        self._max_kept = max(_KEPT, 2 * len(self._kept))

    def compares(self, reply: Message | None, new: Sequence[Message], switches: Switches) -> bool:
        """Count a bridge behind a dummy; return whether to compare it with the rendering of the whole conversation.

        Those are the 1st, 2nd, 4th, 8th, …; and the two bridges after a message with a switch, if the conversation had
        no message with the same switches, or if it is the 1st, 2nd, 4th, 8th, … of its messages with switches. So the
        comparisons of a conversation cost, in all, in proportion to its length.
        """
        self.bridges += 1
        is_new = False
        for message in (*([reply] if reply is not None else ()), *new):
            pattern = switches.found(message)
            if pattern:
                self._switches_seen += 1
                is_new = is_new or pattern not in self._patterns or self._switches_seen.bit_count() == 1
                self._patterns.add(pattern)
        again, self._again = self._again, is_new
        return is_new or again or self.bridges.bit_count() == 1
