"""slime's data source as the manager's data buffer.

Invariant: each group of slime's is out, in a batch, settled, or handed back, exactly once; what it looked like when it
came is kept untouched until then. Groups that have to be played again come out before new ones.

It knows nothing of how groups are played; the numbers that slime gave its samples are put on again by who converts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted
from rollouts.training.data_buffer import DataBuffer

__all__ = ["Taken", "TrainerBuffer"]


@attrs.define(eq=False)
class Taken:
    """A group of slime's that was taken."""

    group: list[Any]
    """slime's samples, as they came."""
    begun: int = 0
    """slime's number of the call that it was taken in."""
    sessions: dict[int, str] = attrs.field(factory=dict)
    """By rollout: the routing key of its requests."""


class TrainerBuffer(DataBuffer):
    """Takes groups from slime's data source, one prompt for each.

    Args:
        source: has ``get_samples(n)``, and ``add_samples(groups)`` where leftovers can go back.
        n_samples_per_prompt: samples in each of its groups.
    """

    def __init__(self, source: Any, n_samples_per_prompt: int) -> None:
        self.source = source
        self.taken: dict[int, Taken] = {}
        """Groups that are out, or settled and in no batch yet, by our group index."""
        self.rollout_id = 0
        """slime's number of the call that is under way."""
        self.on_new: Callable[[int, list[Any]], None] | None = None
        """Called with each group that comes from the source, and the index that it gets here."""
        self._n = n_samples_per_prompt
        self._next = 0
        self._waiting: list[int] = []
        self._again: list[list[Any]] = []

    def __repr__(self) -> str:
        back = len(self._waiting) + len(self._again)
        return f"<TrainerBuffer of {type(self.source).__name__}: {len(self.taken)} groups taken, {back} handed back>"

    def __len__(self) -> int:
        return len(self.source)

    def get_prompts(self, count: int) -> list[Prompt]:
        """Take groups: what was handed back first.

        Raises:
            DataExhausted: the source has no more.
            ConfigError: the source gave something else than groups of the size wanted.
        """
        return [self._take() for _ in range(count)]

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Hand back prompts that came to nothing; they keep their group index."""
        for prompt in prompts:
            if prompt.group_index not in self.taken or prompt.group_index in self._waiting:
                raise ConfigError.of("put_back(prompts)", prompt, "prompts of this buffer that are out")
            self._waiting.append(prompt.group_index)
        self._waiting.sort()

    def settle(self, prompt: Prompt) -> None:
        """Nothing to do: a group is kept until :meth:`pop`, since it has to be converted."""

    def pop(self, group_index: int) -> Taken:
        """Let go of a group that is in a batch, or lost; the source is told where it keeps count."""
        taken = self.taken.pop(group_index)
        if hasattr(self.source, "done"):
            self.source.done([taken.group])
        return taken

    def play_again(self, group_index: int) -> None:
        """Let go of a group that came to its end too late: its prompt comes out again under a new index."""
        self._again.append(self.taken.pop(group_index).group)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The indices of groups that were handed back."""
        return tuple(self._waiting)

    def drain(self) -> list[tuple[int | None, list[Any]]]:
        """Let go of everything that was handed back: our index, where it keeps one, and slime's group."""
        waiting = [(index, self.taken.pop(index).group) for index in self._waiting]
        again = [(None, group) for group in self._again]
        self._waiting, self._again = [], []
        return [*waiting, *again]

    def _take(self) -> Prompt:
        if self._waiting:
            index = self._waiting.pop(0)
            self.taken[index].begun = self.rollout_id
        else:
            index, self._next = self._next, self._next + 1
            again = bool(self._again)
            self.taken[index] = Taken(self._again.pop(0) if again else self._new_group(), begun=self.rollout_id)
            if not again and self.on_new is not None:
                self.on_new(index, self.taken[index].group)
        first = self.taken[index].group[0]
        prompt = Prompt(first.prompt, label=first.label, metadata=first.metadata or {}, group_index=index)
        for sample in self.taken[index].group:
            if isinstance(sample.metadata, str):  # slime hands on what the row has, JSON text too
                sample.metadata = dict(prompt.metadata)
        known = {name: value for name, value in prompt.metadata.items() if name != "start_rollout_id"}
        return attrs.evolve(prompt, metadata=known)

    def _new_group(self) -> list[Any]:
        groups = self.source.get_samples(1)
        if not groups:
            raise DataExhausted(f"{type(self.source).__name__} has no more groups")
        group = groups[0]
        if len(groups) != 1 or not isinstance(group, Sequence) or len(group) != self._n:
            raise ConfigError.of(
                f"{type(self.source).__name__}.get_samples(1)", groups, f"one group of {self._n} samples"
            )
        return list(group)
