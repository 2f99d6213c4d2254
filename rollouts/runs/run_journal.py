"""The events of a run in its journal: written as they happen, and read to resume the run.

Invariant: a rollout is stored before the manager counts it as finished, and its images and tools before it. One record
settles a group, one record seals a batch, and both follow the samples that they refer to; so every prefix of the
journal is a past state of the run. Tokens in records of turns are not written again with the sample.

Reading keeps offsets, not samples, so memory does not grow with the tokens. This module knows the records and the
journal's folder, not the scheduler and not the other files of the run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from rollouts.agent.turn_log import Turn, TurnLog
from rollouts.base.storable import to_msgpack
from rollouts.dtypes import Prompt
from rollouts.errors import JournalError, RolloutsError
from rollouts.runs.images import ImageFolder
from rollouts.runs.journal import Entry, Journal, JournalReader, Offset, TornTail, read_entry
from rollouts.runs.reading import reading, unreadable
from rollouts.runs.record_bytes import Columns, sample_of, turn_of
from rollouts.runs.tools import ToolFolder, named
from rollouts.training.compact_record import CompactRecord
from rollouts.training.data_buffer import Draw
from rollouts.training.metrics import RunMetrics
from rollouts.training.sample_fields import RECORDED
from rollouts.training.types import Group, Outcome, Sample

_AHEAD = 1 << 20
"""Most groups by which an index may exceed the number of prompts taken: takes of one moment are recorded in any order,
and the indices up to the highest are listed."""

__all__ = ["Rollout", "RunHistory", "RunJournal", "SealedBatch"]


# -- reading ----------------------------------------------------------------------------------------------------------


@attrs.define
class Rollout:
    """The offsets of one finished rollout's records."""

    branches: list[Offset]
    whole: int
    """Number of branches; fewer offsets mean that the writer died between two branches."""
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
    """Finished rollouts by index."""
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
                    turns = self.turns.pop(index, None)
                    before = self.rollouts.get(index)
                    offsets = tuple(turns) if turns is not None else before.turns if before is not None else ()
                    self.rollouts[index] = Rollout([], fields["branches"], offsets)
                self.rollouts[index].branches.append(entry.offset)
                self.attempts.pop(index, None)
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
                self.totals.take_lengths()

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


# -- writing ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class _StoredTurns:
    """Length and digests of the columns that a rollout's turn records contain."""

    length: int = 0
    digests: tuple[int, int, int] = (0, 0, 0)

    def with_more(self, columns: Columns) -> _StoredTurns:
        return _StoredTurns(self.length + len(columns.tokens), _digests(columns, self.digests))


@attrs.frozen(eq=False)
class _Written:
    """Fingerprint of a written sample, for detecting later changes."""

    record: CompactRecord | None
    """Its immutable records, if the sample is packed."""
    fields: bytes
    """Its other fields as MessagePack; all fields if it is not packed."""
    columns: tuple[npt.NDArray[Any] | None, ...]

    @classmethod
    def of(cls, sample: Sample, fields: Mapping[str, Any] | None = None) -> _Written:
        """The fingerprint of a sample; ``fields`` are its fields if already computed."""
        record = sample.compact
        if fields is None:
            fields = sample.fields_to_dict(records=record is None)
        if record is not None:
            fields = {name: value for name, value in fields.items() if name not in RECORDED}
        return cls(record, to_msgpack(fields), sample.columns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Written) or self.record is not other.record or self.fields != other.fields:
            return False
        pairs = zip(self.columns, other.columns, strict=True)
        return all(mine is its or _bytes(mine) == _bytes(its) for mine, its in pairs)


def _bytes(column: npt.NDArray[Any] | None) -> bytes | None:
    return None if column is None else column.tobytes()


class RunJournal:
    """Writer of a run's events.

    Args:
        journal: the run's journal.
        turns: turns of rollouts that an earlier process left unfinished, by index.
    """

    def __init__(self, journal: Journal, turns: Mapping[int, Sequence[Turn]] | None = None) -> None:
        self.journal = journal
        self.images = ImageFolder(journal.path.parent)
        self.tools = ToolFolder(journal.path.parent)
        self._earlier = dict(turns or {})
        self._stored_turns: dict[int, _StoredTurns] = {}
        self._written: dict[int, list[_Written]] = {}

    def __repr__(self) -> str:
        return f"<RunJournal in {self.journal!r}>"

    def began(self, description: Mapping[str, Any]) -> None:
        """Record that the run starts or resumes."""
        self.journal.append("run", description)

    def taken(self, prompt: Prompt, position: int | None = None) -> None:
        """Record that a prompt was taken from the buffer, where a sampler chose it."""
        chosen = {} if position is None else {"position": position}
        self.journal.append("taken", {"group": prompt.group_index, **chosen})

    def turn_log(self, index: int) -> TurnLog:
        """The turn log of one attempt at a rollout; it starts with the turns that an earlier process stored."""
        turns = self._earlier.pop(index, ())
        self._stored_turns[index] = stored = _StoredTurns()
        for turn in turns:
            stored = self._stored_turns[index] = stored.with_more(Columns.of(turn))

        async def save(turn: Turn | None) -> None:
            if turn is None:
                self._stored_turns[index] = _StoredTurns()
                self.journal.append("turn", {"index": index, "first": True})
            else:
                await self.images.store(turn.images)
                columns = Columns.of(turn)
                first = turn.number == 1 and "conversation" not in turn.fields  # of a play: with those of the others
                stored = _StoredTurns() if first else self._stored_turns[index]
                fields = {"index": index, "number": turn.number, "first": first, "turn": turn.fields}
                self.journal.append("turn", fields, columns)
                self._stored_turns[index] = stored.with_more(columns)
            await self.journal.commit()

        return TurnLog(save, turns)

    def attempt_lost(self, index: int, attempt: int, samples: Sequence[Sample]) -> None:
        """Record that an attempt at a rollout failed; its turns are discarded."""
        self._stored_turns.pop(index, None)
        failure = next((sample.failure for sample in samples if sample.failure), None)
        why = {} if failure is None else {"kind": failure.kind, "message": failure.message}
        self.journal.append("attempt", {"index": index, "attempt": attempt, "first": True, "failure": why})

    async def finished(self, samples: Sequence[Sample]) -> None:
        """Record a finished and scored rollout; returns when it is committed."""
        assert samples[0].index is not None, "the manager numbers its rollouts"
        await self._store_files(samples)
        self._written[samples[0].index] = list(map(_Written.of, samples, self._append(samples)))
        await self.journal.commit()

    async def settled(self, group: Group, appended: Callable[[], None] = lambda: None) -> None:
        """Record a group's outcome, and samples changed since :meth:`finished`; returns when it is committed.

        Args:
            group: the settled group.
            appended: called in the step that appends the record, so that its effects have the order of the journal.
        """
        rollouts: dict[int, list[Sample]] = {}
        for sample in group.samples:
            assert sample.index is not None, "the manager numbers its rollouts"
            rollouts.setdefault(sample.index, []).append(sample)
        for index, samples in rollouts.items():
            if self._written.pop(index, None) != [_Written.of(sample) for sample in samples]:
                await self._store_files(samples)
                self._append(samples)
            self._stored_turns.pop(index, None)
        fields: dict[str, Any] = {"group": group.group_index, "outcome": group.outcome, "reason": group.reason}
        fields |= {"rollouts": list(rollouts), "rewards": group.rollout_rewards, "lengths": group.rollout_lengths}
        self.journal.append("group", fields)
        appended()
        await self.journal.commit()

    def sealed(self, number: int, groups: Sequence[int], metrics: Mapping[str, float], accounting: Any) -> None:
        """Record that a batch is handed out."""
        fields: dict[str, Any] = {"batch": number, "groups": list(groups), "metrics": metrics}
        self.journal.append("sealed", {**fields, "accounting": attrs.asdict(accounting)})

    async def _store_files(self, samples: Sequence[Sample]) -> None:
        """Write the images and tools that samples name."""
        for sample in samples:
            await self.images.store(sample.named_images)
            await self.tools.store(sample.tools)

    def _append(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Append the records of a rollout; returns the fields of its samples."""
        index = samples[0].index
        assert index is not None, "the manager numbers its rollouts"
        stored = self._stored_turns.get(index, _StoredTurns()) if len(samples) == 1 else _StoredTurns()
        sample_fields = [sample.fields_to_dict() for sample in samples]
        for branch, sample in enumerate(samples):
            columns = Columns.of(sample)
            start = stored.length
            if start and (start > len(sample) or _digests(_cut(columns, 0, start)) != stored.digests):
                start = 0
            fields: dict[str, Any] = {"index": index, "branch": branch, "branches": len(samples), "from": start}
            fields |= {"length": len(sample), "sample": named(sample_fields[branch])}
            self.journal.append("sample", fields, _cut(columns, start, len(sample)))
        return sample_fields


def _cut(columns: Columns, start: int, stop: int) -> Columns:
    logprobs = None if columns.logprobs is None else columns.logprobs[start:stop]
    return Columns(columns.tokens[start:stop], columns.mask[start:stop], logprobs)


def _digests(columns: Columns, start: tuple[int, int, int] = (0, 0, 0)) -> tuple[int, int, int]:
    logprobs = b"" if columns.logprobs is None else columns.logprobs.tobytes()
    parts = (columns.tokens.tobytes(), columns.mask.tobytes(), logprobs)
    tokens, mask, numbers = (zlib.crc32(part, crc) for part, crc in zip(parts, start, strict=True))
    return tokens, mask, numbers
