"""slime's data source as the manager's data buffer.

Invariant: each group of slime is in exactly one state: taken, in a batch, settled, or returned; its original samples
stay unchanged until then. Groups that must be played again come out before new ones.

This module does not know how groups are played; the converter restores slime's indices on the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted
from rollouts.integrations.slime.given_samples import shown_prompt
from rollouts.training.data_buffer import DataBuffer

__all__ = ["Taken", "TrainerBuffer"]


@attrs.define(eq=False)
class Taken:
    """A group of slime's samples, unchanged, that was taken from the source."""

    group: list[Any]
    begun: int = 0
    """slime's rollout_id of the call that took it."""
    started: dict[int, float] = attrs.field(factory=dict)
    """Unix time at which each rollout began, by its position in the group."""
    replays: int = 0
    """How often its rollouts were too old, and were played again."""
    sessions: dict[int, str] = attrs.field(factory=dict)
    """The routing key of each rollout's requests, by the rollout's position in the group."""

    def own_prompt(self, number: int, prompt: Prompt) -> Prompt:
        """The prompt of one rollout: samples of a group may have other prompts, labels and metadata than the first."""
        record, first = self.group[number], self.group[0]
        if record is first:
            return prompt
        # Where the prompts are equal, the rollouts share one object: its images are encoded once.
        text = prompt.prompt if record.prompt == first.prompt else shown_prompt(record)
        return attrs.evolve(prompt, prompt=text, label=record.label, metadata=_metadata_of(record))


_MOST_REPLAYS = 3
"""A prompt whose rollouts take longer than the bound on their age would be played again for ever."""


class TrainerBuffer(DataBuffer):
    """Takes groups from slime's data source, as one prompt each.

    Args:
        source: has ``get_samples(n)``, as slime's data source.
        wave: groups of one request to the source; groups that are not needed yet wait here.
        kept: groups that the source did not take back, to come out first.
    """

    def __init__(self, source: Any, n_samples_per_prompt: int, wave: int = 1, kept: Iterable[list[Any]] = ()) -> None:
        self.source = source
        self.taken: dict[int, Taken] = {}
        """Groups in flight, and settled groups that are in no batch yet, by our group index."""
        self.rollout_id = 0
        """slime's number of the current call."""
        self.on_new: Callable[[int, list[Any]], None] | None = None
        """Called for each new group of the source, with its group index and its samples."""
        self._n, self._wave = n_samples_per_prompt, wave
        self._next = 0
        self.waiting: list[int] = []
        """The indices of returned groups."""
        self._again: list[Taken] = []
        self.given_up = 0
        """Prompts whose rollouts were too old each time."""
        self._new = list(kept)
        """Groups of the last request that are not taken yet."""
        self.held: list[list[Any]] = []
        """Groups of an earlier call that a buffer filter has not chosen yet, with their finished rollouts."""
        self.chosen: list[list[Any]] = []
        """Groups that a buffer filter has chosen or changed: they come out first."""

    def __repr__(self) -> str:
        returned = (self.waiting, self._again, self._new, self.chosen, self.held)
        back = sum(len(groups) for groups in returned)
        return f"<TrainerBuffer of {type(self.source).__name__}: {len(self.taken)} groups taken, {back} returned>"

    def __len__(self) -> int:
        return len(self.source)

    def get_prompts(self, count: int) -> list[Prompt]:
        """Take one prompt per group, returned groups first.

        Raises:
            DataExhausted: the source has no more groups.
            ConfigError: the source returned something else than groups of ``n_samples_per_prompt``.
        """
        return [self._take() for _ in range(count)]

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Return prompts of unfinished groups; they keep their group index."""
        for prompt in prompts:
            if prompt.group_index not in self.taken or prompt.group_index in self.waiting:
                raise ConfigError.of("put_back(prompts)", prompt, "prompts of this buffer that are out")
            self.waiting.append(prompt.group_index)
        self.waiting.sort()

    def mark_done(self, prompt: Prompt) -> None:
        """Do nothing: a group stays until :meth:`pop`, because it must still be converted."""

    def pop(self, group_index: int) -> Taken:
        """Remove a group that is in a batch or lost; call ``done`` of the source if it has that method."""
        taken = self.taken.pop(group_index)
        if hasattr(self.source, "done"):
            self.source.done([taken.group])
        return taken

    def play_again(self, group_index: int, *, stale: bool = False) -> None:
        """Remove a settled group: its prompt comes out again under a new index, or is given up if it is often stale."""
        taken = self.taken[group_index]
        if stale and taken.replays == _MOST_REPLAYS:
            self.given_up += 1
            self.pop(group_index)
        else:
            taken.replays += stale
            self._again.append(self.taken.pop(group_index))

    def drain(self) -> list[tuple[int | None, Taken]]:
        """Remove all returned groups; return our group index (``None`` if it is played again) and the group."""
        waiting = [(index, self.taken.pop(index)) for index in self.waiting]
        again = [*self._again, *map(Taken, (*self.chosen, *self._new, *self.held))]
        self.waiting, self._again, self._new, self.chosen, self.held = [], [], [], [], []
        return [*waiting, *((None, taken) for taken in again)]

    def withdraw(self, group_index: int) -> None:
        """Forget a group that a buffer filter took out of the rollouts."""
        self.taken.pop(group_index)
        self.waiting = [index for index in self.waiting if index != group_index]

    def _take(self) -> Prompt:
        if self.waiting:
            index = self.waiting.pop(0)
            self.taken[index].begun = self.rollout_id
        else:
            index, self._next = self._next, self._next + 1
            again = bool(self._again) and not self.chosen
            earlier = self._again.pop(0) if again else None
            group, replays = (self._new_group(), 0) if earlier is None else (earlier.group, earlier.replays)
            self.taken[index] = Taken(group, begun=self.rollout_id, replays=replays)
            if not again and self.on_new is not None:
                self.on_new(index, self.taken[index].group)
        for sample in self.taken[index].group:
            if isinstance(sample.metadata, str):  # slime passes the row's value, JSON text included
                sample.metadata = dict(Prompt("", metadata=sample.metadata).metadata)
        first = self.taken[index].group[0]
        return Prompt(shown_prompt(first), label=first.label, metadata=_metadata_of(first), group_index=index)

    def _new_group(self) -> list[Any]:
        if self.chosen:
            return self.chosen.pop(0)
        if not self._new:
            self._new = list(self.source.get_samples(self._wave))
        if not self._new:
            raise DataExhausted(f"{type(self.source).__name__} has no more groups")
        group = self._new.pop(0)
        if not isinstance(group, Sequence) or len(group) != self._n:
            raise ConfigError.of(f"{type(self.source).__name__}.get_samples()", group, f"groups of {self._n} samples")
        return list(group)


def _metadata_of(sample: Any) -> dict[str, Any]:
    return {name: value for name, value in (sample.metadata or {}).items() if name != "start_rollout_id"}
