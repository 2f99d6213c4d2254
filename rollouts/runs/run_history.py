"""The content of a run's journal, from which the run resumes.

Invariant: a history is the state of the run at the end of its journal, since every prefix of a journal is a past state.
Reading keeps offsets, not samples, so memory does not grow with the tokens. This module knows the records that
``run_journal.py`` writes, not the scheduler and not the other files of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rollouts.agent.turn_log import Turn
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import JournalError, RolloutsError
from rollouts.runs.images import ImageFolder
from rollouts.runs.journal import Entry, JournalReader, Offset, TornTail, read_entry
from rollouts.runs.reading import reading, unreadable
from rollouts.runs.record_bytes import Columns, sample_of, turn_of
from rollouts.runs.tools import ToolFolder
from rollouts.training.data_buffer import Draw
from rollouts.training.metrics import RunMetrics
from rollouts.training.types import Outcome, Sample

__all__ = ["Rollout", "RunHistory", "SealedBatch"]

_AHEAD = 1 << 20
"""Most groups by which an index may exceed the number of prompts taken. Prompts that were taken at one moment are
recorded in any order; a damaged index above that would make :attr:`RunHistory.unsettled` endless."""


@attrs.define
class Rollout:
    """The offsets of one stored rollout's records."""

    branches: list[Offset]
    whole: int
    """Number of branches that it has when it is finished."""
    turns: tuple[Offset, ...]

    @property
    def finished(self) -> bool:
        return len(self.branches) == self.whole


@attrs.frozen
class SealedBatch:
    """One batch that was handed to the trainer or to the writer."""

    number: int
    groups: tuple[int, ...]
    metrics: Mapping[str, float]
    accounting: Mapping[str, int]


@attrs.define
class RunHistory:
    """The content of a run's journal."""

    path: Path
    runs: list[dict[str, Any]] = attrs.field(factory=list)
    """The record of the start and of each resumption."""
    taken: int = 0
    """Prompts taken from the buffer, repetitions included."""
    groups: int = 0
    """Group indices in use."""
    draws: list[Draw] = attrs.field(factory=list)
    """The draws and the rewards in their order, for a sampler."""
    rollouts: dict[int, Rollout] = attrs.field(factory=dict)
    """Stored rollouts by index; one whose writer died between two branches is not finished."""
    turns: dict[int, list[Offset]] = attrs.field(factory=dict)
    """Turns of unfinished rollouts by index."""
    attempts: dict[int, int] = attrs.field(factory=dict)
    """Number of failed attempts of unfinished rollouts by index."""
    settled: dict[int, tuple[Outcome, str, tuple[int, ...]]] = attrs.field(factory=dict)
    """Outcome, reason and rollouts of each settled group."""
    sealed: list[SealedBatch] = attrs.field(factory=list)
    totals: RunMetrics = attrs.field(factory=RunMetrics)
    torn: TornTail | None = None
    """The end of the journal that was not read."""
    tools: ToolFolder = attrs.field(init=False)
    _stored: dict[int, Rollout] = attrs.field(factory=dict, init=False)
    """Rollouts of which not all branches are read yet, by index; a finished one stays in ``rollouts`` until then."""

    def __attrs_post_init__(self) -> None:
        self.tools = ToolFolder(self.path.parent)

    @property
    def images(self) -> ImageFolder:
        """The images of the run that the journal is of."""
        return ImageFolder(self.path.parent)

    @classmethod
    def read(cls, path: Path, batches: int | None = None) -> RunHistory:
        """Read a whole journal.

        Args:
            path: the journal's folder.
            batches: as for :class:`JournalReader`.

        Raises:
            JournalError: the journal is damaged.
        """
        history, reader = cls(path), JournalReader(path, batches)
        entry: Entry | None = None
        try:
            for entry in reader:
                history._add(entry)
        except RolloutsError:
            raise
        except Exception as error:  # a record that a stranger made may make a reader raise anything
            place = path if entry is None else _place(path, entry)
            raise unreadable(place, error, JournalError) from error
        history.torn = reader.torn
        return history

    @property
    def unsettled(self) -> list[int]:
        """Groups without an outcome."""
        return [number for number in range(self.groups) if number not in self.settled]

    @property
    def ready(self) -> list[int]:
        """Accepted groups that are in no batch."""
        in_batch = {number for batch in self.sealed for number in batch.groups}
        kept = (number for number, (outcome, _, _) in self.settled.items() if outcome == "kept")
        return sorted(number for number in kept if number not in in_batch)

    def samples(self, index: int) -> list[Sample]:
        """The samples of one finished rollout, by its index.

        Raises:
            JournalError: the journal does not have them.
        """
        with reading(f"{self.path}, rollout {index}", JournalError):
            rollout = self.rollouts[index]
            return [self._sample(read_entry(self.path, offset), rollout) for offset in rollout.branches]

    def group_samples(self, group_index: int) -> list[Sample]:
        """The samples of one settled group, in order."""
        return [sample for index in self.settled[group_index][2] for sample in self.samples(index)]

    def read_turns(self, index: int) -> list[Turn]:
        """The turns of one unfinished rollout, by its index.

        Raises:
            JournalError: the journal does not have them.
        """
        with reading(f"{self.path}, rollout {index}", JournalError):
            return [self._turn(read_entry(self.path, offset)) for offset in self.turns.get(index, ())]

    def _add(self, entry: Entry) -> None:
        fields = entry.fields
        match entry.kind:
            case "run":
                self.runs.append(fields)
            case "taken":
                self.taken += 1
                if fields["group"] >= self.groups:  # the first time
                    if fields["group"] > self.taken + _AHEAD:
                        raise JournalError(
                            f"{_place(self.path, entry)}: group {fields['group']} of {self.taken} prompts"
                        )
                    self.groups = fields["group"] + 1
                    self.draws.append((fields["group"], fields.get("position"), None))
            case "turn" | "attempt":
                if entry.kind == "attempt":
                    self.attempts[fields["index"]] = fields["attempt"]
                if entry.columns is None or fields["first"]:
                    self.turns.pop(fields["index"], None)
                if entry.columns is not None:
                    self.turns.setdefault(fields["index"], []).append(entry.offset)
            case "sample":
                index, branch = fields["index"], fields["branch"]
                if branch == 0:
                    turns = self.turns.get(index)
                    before = self.rollouts.get(index)
                    offsets = tuple(turns) if turns is not None else before.turns if before is not None else ()
                    self._stored[index] = Rollout([], fields["branches"], offsets)
                latest = self._stored[index]
                latest.branches.append(entry.offset)
                if latest.finished or index not in self.rollouts or not self.rollouts[index].finished:
                    self.rollouts[index] = latest  # until then, a rollout that is stored again is as it was
                if latest.finished:
                    for unfinished in (self._stored, self.turns, self.attempts):
                        unfinished.pop(index, None)
            case "group":
                if fields["group"] in self.settled:  # accepted before, then dropped as stale
                    self.totals.reasons[fields["reason"]] += 1
                else:
                    self.totals.count(fields["outcome"], fields["reason"], fields["lengths"], fields["rewards"])
                    if fields["outcome"] != "failed":
                        self.draws.append((fields["group"], None, fields["rewards"]))
                self.settled[fields["group"]] = (fields["outcome"], fields["reason"], tuple(fields["rollouts"]))
            case "sealed":
                number, groups = fields["batch"], tuple(fields["groups"])
                self.sealed.append(SealedBatch(number, groups, fields["metrics"], fields["accounting"]))
                self.totals.take_lengths()  # they are in the metrics of this batch

    def _sample(self, entry: Entry, rollout: Rollout) -> Sample:
        assert entry.columns is not None, "a sample has columns"
        columns = entry.columns
        if entry.fields["from"]:
            turns = [read_entry(self.path, offset).columns for offset in rollout.turns]
            columns = _joined([*(part for part in turns if part is not None), columns])
        if len(columns.tokens) != entry.fields["length"]:
            where = f"segment {entry.offset.segment}, offset {entry.offset.offset}"
            raise JournalError(f"{self.path}, {where}: {len(columns.tokens)} tokens of {entry.fields['length']}")
        return sample_of(self.tools.restored(entry.fields["sample"]), columns, self.images.load)

    def _turn(self, entry: Entry) -> Turn:
        assert entry.columns is not None, "a turn has columns"
        return turn_of(entry.fields, entry.columns, self.images.load)


def _place(path: Path, entry: Entry) -> str:
    return f"{path}, segment {entry.offset.segment}, offset {entry.offset.offset}, a record of kind {entry.kind}"


def _joined(parts: Sequence[Columns]) -> Columns:
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return Columns(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.mask for part in parts]),
        np.concatenate(logprobs) if len(logprobs) == len(parts) else None,
    )
