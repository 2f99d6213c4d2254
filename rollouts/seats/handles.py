"""The seats as a play sees them: each begins conversations.

Invariant: a name that no seat has is a ConfigError, also where the play suppresses it. This module samples nothing.
"""

from __future__ import annotations

from typing import Any

from rollouts.errors import ConfigError
from rollouts.seats.chat import Chat
from rollouts.seats.run import Run
from rollouts.seats.table import Table

__all__ = ["SeatHandle", "Seats"]


class SeatHandle:
    """One seat in a play: begins its conversations."""

    def __init__(self, table: Table, name: str) -> None:
        self._table = table
        self.name = name

    def __repr__(self) -> str:
        return f"<seat {self.name}, {len(self._table.conversations[self.name])} conversations>"

    @property
    def trained(self) -> bool:
        """Whether its conversations are samples."""
        return self._table.seats[self.name].trained

    @property
    def last(self) -> Any:
        """The conversation that was begun last: a :class:`Chat` or a :class:`Run`.

        Raises:
            IndexError: there is none.
        """
        return self._table.conversations[self.name][-1]

    def chat(self, system: str = "") -> Chat:
        """Begin a conversation; nothing is sampled before the first ``ask``.

        Raises:
            ConfigError: the seat is a program, which has no chats.
        """
        return Chat(self._table, self.name, system)

    async def run(self, prompt: Any = None, **options: Any) -> Run:
        """Play a whole episode with the seat's environment, or its program in a fresh sandbox.

        Args:
            prompt: text, messages, or a :class:`Prompt` with label and metadata for the environment; by default that
                of the rollout.
            **options: of :func:`~rollouts.training.program_rollout_to_samples` for a program, such as ``workspace``.

        Raises:
            SeatFailed: the episode failed, and with it the rollout.
        """
        run = Run(self._table, self.name)
        await run.play(self._table.prompt if prompt is None else prompt, options)
        return run


class Seats:
    """The seats of a play: ``seats.NAME`` or ``seats[NAME]``."""

    def __init__(self, table: Table) -> None:
        self._handles = {name: SeatHandle(table, name) for name in table.seats}
        self._table = table

    def __getitem__(self, name: str) -> SeatHandle:
        found = self._handles.get(name)
        if found is None:
            error = ConfigError.of("seats", name, f"one of {', '.join(self._handles)}")
            self._table.note(error)
            raise error
        return found

    def __getattr__(self, name: str) -> SeatHandle:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __iter__(self) -> Any:
        return iter(self._handles.values())
