"""The writer of a run's journal: its events, as they happen.

Invariant: a rollout is stored before the manager counts it as finished, and its images and tools before it. One record
settles a group, one record seals a batch, and both follow the samples that they refer to; so every prefix of the
journal is a past state of the run. Tokens in records of turns are not written again with the sample.

``run_history.py`` reads the records. This module knows the journal's folder, not the scheduler and not the other files
of the run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rollouts.agent.turn_log import Turn, TurnLog
from rollouts.base.storable import to_msgpack
from rollouts.dtypes import Prompt
from rollouts.dtypes.lazy_numpy import npt
from rollouts.runs.images import ImageFolder
from rollouts.runs.journal import Journal
from rollouts.runs.record_bytes import Columns
from rollouts.runs.tools import ToolFolder, with_named_tools
from rollouts.training.compact_record import CompactRecord
from rollouts.training.sample_fields import RECORDED
from rollouts.training.types import Group, Sample

__all__ = ["RunJournal"]


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
        stored = _StoredTurns()
        for turn in turns:
            stored = stored.with_more(Columns.of(turn))
        if self._stored_turns.pop(index, None) is not None:  # of an attempt whose group was put back
            self.journal.append("turn", {"index": index})
        if turns:  # else there is nothing to note; an empty entry would stay if the group is returned
            self._stored_turns[index] = stored

        async def save(turn: Turn | None) -> None:
            # A record with "first", or without a turn, discards the turns of this rollout before it.
            if turn is None:
                self._stored_turns[index] = _StoredTurns()
                self.journal.append("turn", {"index": index})
            else:
                await self.images.store(turn.images)
                columns = Columns.of(turn)
                first = turn.number == 1 and "conversation" not in turn.fields  # those of a play share one log
                stored = _StoredTurns() if first else self._stored_turns.get(index, _StoredTurns())
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
        self.journal.append("attempt", {"index": index, "attempt": attempt, "failure": why})

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
            fields |= {"length": len(sample), "sample": with_named_tools(sample_fields[branch])}
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
