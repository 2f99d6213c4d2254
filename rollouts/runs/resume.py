"""Resuming a stopped or killed run: read its journal, and make its files agree with it.

Invariant: the journal is authoritative; after :func:`reopen` the files contain every settled group exactly once, and
nothing else. A partly written group is removed and written again. This module generates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.runs.checksums import is_sound
from rollouts.runs.folder import JOURNAL, read_info, run_files
from rollouts.runs.journal import Journal
from rollouts.runs.run_journal import RunHistory, RunJournal
from rollouts.runs.writer import RunWriter
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.manager_state import ManagerState
from rollouts.training.metrics import Accounting
from rollouts.training.types import Group, Sample

__all__ = ["Reopened", "begin", "reopen", "state_of_history"]


@attrs.frozen
class Reopened:
    """A run ready to continue."""

    writer: RunWriter
    run_journal: RunJournal
    state: ManagerState
    history: RunHistory


def begin(path: Path, description: Mapping[str, Any], buffer: DataBuffer) -> RunJournal:
    """Start the journal of a new run.

    Raises:
        JournalError: it cannot be written.
    """
    journal = Journal(path / JOURNAL)
    run_journal = RunJournal(journal)
    run_journal.began(_identity(description, buffer))
    journal.flush()
    return run_journal


def reopen(path: Path, description: Mapping[str, Any], buffer: DataBuffer) -> Reopened:
    """Open a run to resume it; restores the buffer's position.

    Args:
        path: the run's folder.
        description: :meth:`Recipe.describe` of the current recipe; its sizes and data must be those of the run.
        buffer: over the same data.

    Raises:
        ConfigError: there is no run, it has no journal, another process writes to it, or the recipe differs.
        JournalError: the journal is damaged.
    """
    read_info(path)
    if not (path / JOURNAL).is_dir():
        raise ConfigError.of("--resume", str(path), "a run with a journal")
    journal = Journal(path / JOURNAL)
    try:
        history = RunHistory.read(path / JOURNAL)
        identity = _identity(description, buffer)
        if history.runs:
            _check_identity(history.runs[0], identity)
        group_size = identity["n_samples_per_prompt"]
        state = state_of_history(history, buffer, group_size)
        turns = {index: history.read_turns(index) for index in history.turns}
        run_journal = RunJournal(journal, turns)
        run_journal.began({**identity, "resumed": max(1, len(history.runs))})
        journal.flush()
        writer = RunWriter.reopen(path)
        _synchronize(writer, history, state)
    except BaseException:
        journal.close()
        raise
    return Reopened(writer, run_journal, state, history)


def _identity(description: Mapping[str, Any], buffer: DataBuffer) -> dict[str, Any]:
    """The settings that a resumed run must keep."""
    config = description["config"]
    sizes = {name: config[name] for name in ("batch_size", "n_samples_per_prompt")}
    return {"recipe": description.get("recipe"), **sizes, "data": buffer.fingerprint}


def _check_identity(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if then.get(name) != value:
            expected = "the run's seed and prompts" if name == "data" else repr(then.get(name))
            raise ConfigError.of(f"--resume, {name}", value, f"{expected}: a resumed run keeps its settings")


# -- files ------------------------------------------------------------------------------------------------------------


def _synchronize(writer: RunWriter, history: RunHistory, state: ManagerState) -> None:
    """Write the groups that the files lack; remove those that the journal does not have."""
    for outcome in ("dropped", "failed"):
        file = writer.path / f"{outcome}.jsonl"
        written = _groups_in(file, history)
        for number, (settled, reason, _) in history.settled.items():
            if settled == outcome and number not in written:
                writer.on_group(_group(history, number, reason))
    (writer.path / "unbatched.jsonl").unlink(missing_ok=True)
    batches = [file for outcome, file in run_files(writer.path) if outcome == "kept"]
    for name in batches[len(history.sealed) :]:  # of a journal that lost its end: their groups are ready again
        (writer.path / name).unlink()
    writer.batches = min(writer.batches, len(history.sealed))
    for batch in history.sealed[writer.batches :]:
        samples = [sample for number in batch.groups for sample in history.group_samples(number)]
        writer.write_batch(samples, batch.metrics, msgspec.convert(dict(batch.accounting), Accounting))
    writer.write_metrics([batch.metrics for batch in history.sealed])
    for number in state.ready:
        writer.on_group(_group(history, number, ""))


def _group(history: RunHistory, number: int, reason: str) -> Group:
    outcome = history.settled[number][0]
    samples = tuple(history.group_samples(number))
    return Group(Prompt(samples[0].prompt, group_index=number), samples, outcome, reason)


class _Line(msgspec.Struct):
    group_index: int


def _groups_in(file: Path, history: RunHistory) -> set[int]:
    """The complete groups in a file; cuts the file after the last one."""
    complete: set[int] = set()
    end = 0
    if not file.exists():
        return complete
    for number, rows, stop in _runs_of_lines(file):
        settled = history.settled.get(number)
        expected = sum(history.rollouts[index].whole for index in settled[2]) if settled else 0
        if rows != expected:
            break
        complete.add(number)
        end = stop
    if file.stat().st_size > end:
        with file.open("r+b") as opened:
            opened.truncate(end)
            os.fsync(opened.fileno())
    return complete


def _runs_of_lines(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield ``(group, lines, end offset)`` for consecutive lines of one group, up to the first incomplete line."""
    group: int | None = None
    count = end = 0
    with file.open("rb") as lines:
        for line in lines:
            try:
                whole = line.endswith(b"\n") and is_sound(line) is not False
                number = msgspec.json.decode(line, type=_Line).group_index if whole else None
            except (msgspec.DecodeError, UnicodeDecodeError):
                number = None
            if number != group and group is not None:
                yield group, count, end
                count = 0
            if number is None:
                return
            group, count, end = number, count + 1, end + len(line)
    if group is not None:
        yield group, count, end


def state_of_history(history: RunHistory, buffer: DataBuffer, group_size: int) -> ManagerState:
    """Rebuild the manager's state from a journal; restores the buffer's position.

    Args:
        history: the journal's content.
        buffer: over the same data.
        group_size: rollouts in a group.
    """
    buffer.go_on_after(history.groups, [*history.unsettled, *history.ready])
    outcomes = [outcome for outcome, _, _ in history.settled.values()]
    accounting = Accounting(
        taken=history.taken,
        ready=len(history.ready),
        in_batch=sum(len(batch.groups) for batch in history.sealed),
        dropped=outcomes.count("dropped"),
        failed=outcomes.count("failed"),
    )
    accounting.in_flight = history.taken - len(history.settled)
    finished: dict[int, dict[int, list[Sample]]] = {}
    for number in history.unsettled:
        indices = range(number * group_size, (number + 1) * group_size)
        done = [index for index in indices if index in history.rollouts and history.rollouts[index].finished]
        finished[number] = {index - number * group_size: history.samples(index) for index in done}
    return ManagerState(
        accounting=accounting,
        batches=len(history.sealed),
        ready={number: history.group_samples(number) for number in history.ready},
        finished=finished,
        attempts=dict(history.attempts),
        totals=history.totals.to_dict(),
    ).with_in_flight_returned()
