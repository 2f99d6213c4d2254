"""Passes over the data that skip some prompts: the common part of two samplers.

Each prompt has a share: the part of the passes in which it is drawn. A pass goes through the prompts in the order of an
epoch of the data buffer and adds the share of each to its credit; a credit of 1 pays for a draw. So a prompt with a
share of 0.2 is drawn in every fifth pass, where a random choice would now and then leave it out in ten passes. The
first credits differ, so that prompts with equal shares are not all drawn in the same pass.

Invariant: with several environments (:func:`~rollouts.training.mixing.mixed_prompts`) the sequence of environments is
that of the data, and each environment has passes over its prompts only: a prompt that is skipped is replaced by another
one of its environment.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rollouts.dtypes import Prompt
from rollouts.dtypes.messages import ENVIRONMENT
from rollouts.training.data_buffer import shuffled

__all__ = ["PassSampler"]


@attrs.define(eq=False)
class _Walk:
    """The passes over the prompts of one environment."""

    number: int = 0
    """Number of the pass, from 0."""
    cursor: int = 0
    order: list[int] = attrs.field(factory=list)
    """The positions of the pass."""


class PassSampler(abc.ABC):
    """Draws each prompt in a share of the passes over the data."""

    def begin(self, prompts: Sequence[Prompt], seed: int | None) -> None:
        self._seed = seed
        self._environments = [str(prompt.metadata.get(ENVIRONMENT, "")) for prompt in prompts]
        self._walks = {name: _Walk() for name in dict.fromkeys(self._environments)}
        self._credits: dict[int, float] = {}
        self._skipped = 0
        self._epoch, self._order = 0, self._shuffled(0)
        for name, walk in self._walks.items():
            walk.order = self._order_of(name, 0)

    @abc.abstractmethod
    def share(self, position: int, number: int) -> float:
        """The share of a prompt in pass ``number``, above 0 and at most 1."""

    def next(self, draw: int) -> int:
        return self._advance(self._environment_of(draw), None)

    def drawn(self, draw: int, position: int) -> None:
        self._advance(self._environments[position], position)

    def _advance(self, environment: str, wanted: int | None) -> int:
        """Continue to the next prompt that is drawn; for a recorded draw, until the ``wanted`` one is."""
        walk = self._walks[environment]
        while True:
            if walk.cursor == len(walk.order):
                walk.number, walk.cursor = walk.number + 1, 0
                walk.order = self._order_of(environment, walk.number)
            position = walk.order[walk.cursor]
            walk.cursor += 1
            credit = self._credit(position) + self.share(position, walk.number)
            if credit >= 1 and wanted in (None, position):
                self._credits[position] = credit - 1
                return position
            self._credits[position] = min(credit, 1.0)  # 1 only if the draw was recorded under other numbers
            self._skipped += 1

    def _credit(self, position: int) -> float:
        known = self._credits.get(position)
        return zlib.crc32(f"{self._seed}/{position}".encode()) / 2**32 if known is None else known

    def pass_of(self, position: int) -> int:
        """The number of the current pass over the prompts of the environment of ``position``."""
        return self._walks[self._environments[position]].number

    def _environment_of(self, draw: int) -> str:
        if len(self._walks) == 1:
            return self._environments[0]
        epoch, place = divmod(draw, len(self._environments))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return self._environments[self._order[place]]

    def _shuffled(self, epoch: int) -> list[int]:
        return shuffled(len(self._environments), self._seed, epoch)

    def _order_of(self, environment: str, number: int) -> list[int]:
        order = self._shuffled(number)
        if len(self._walks) == 1:
            return order
        return [position for position in order if self._environments[position] == environment]

    def metrics(self) -> Mapping[str, float]:
        return {"skipped": self._skipped}

    def state_dict(self) -> dict[str, Any]:
        return {
            "passes": {name: [walk.number, walk.cursor] for name, walk in self._walks.items()},
            "credits": {str(position): credit for position, credit in self._credits.items()},
            "skipped": self._skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, (number, cursor) in state["passes"].items():
            self._walks[name] = _Walk(number, cursor, self._order_of(name, number))
        self._credits = {int(position): credit for position, credit in state["credits"].items()}
        self._skipped = state["skipped"]
