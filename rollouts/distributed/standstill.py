"""Rollouts of a worker whose deadlines are paused, so that the manager's side pauses those around them, too.

Invariant: a report has what changed since the last one; a pause that began and ended in between is not in it. This
module does not know why deadlines are paused: it stands among them (:class:`~rollouts.concurrency.deadlines.Clocks`).
"""

from __future__ import annotations

from collections.abc import Callable

from rollouts.concurrency.deadlines import deadline

__all__ = ["Standstill"]

_NEVER_SECONDS = 1e12


class Standstill:
    """The rollouts of one worker, by the numbers of their requests."""

    def __init__(self) -> None:
        self._paused: set[int] = set()
        self._said: set[int] = set()
        """The rollouts whose pause is reported, and its end is not."""

    def __repr__(self) -> str:
        return f"<Standstill: {len(self._paused)} rollouts wait>"

    def around(self, number: int) -> deadline:
        """The context of a rollout."""

        def say(paused: bool) -> None:
            (self._paused.add if paused else self._paused.discard)(number)

        return _Marker(say)

    def ended(self, number: int) -> None:
        """The rollout has ended; its result says so."""
        self._paused.discard(number)
        self._said.discard(number)

    def news(self) -> tuple[list[int], list[int]]:
        """Rollouts that stand still since the last call, and rollouts that no longer do."""
        paused, running = sorted(self._paused - self._said), sorted(self._said - self._paused)
        self._said = set(self._paused)
        return paused, running


class _Marker(deadline):
    """A deadline that never expires, and says when it is paused and when it runs."""

    __slots__ = ("_say",)

    def __init__(self, say: Callable[[bool], None]) -> None:
        super().__init__(_NEVER_SECONDS, armed=False)
        self._say = say

    def pause(self) -> bool:
        if not self.pauses:
            self._say(True)
        return super().pause()

    def resume(self) -> None:
        super().resume()
        if not self.pauses:
            self._say(False)
