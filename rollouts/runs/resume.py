"""Resuming a stopped or killed run: read its journal, and make its files agree with it.

Invariant: the journal is authoritative; after :func:`reopen` the files contain every settled group exactly once, and
nothing else. A partly written group is removed and written again. A torn tail of the journal is cut and recorded; no
batch that ``run.json`` counts is lost with it. This module generates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, RolloutsError
from rollouts.runs import parquet
from rollouts.runs.checksums import is_sound
from rollouts.runs.info import batches_written, read_info
from rollouts.runs.journal import Journal, TornTail
from rollouts.runs.layout import JOURNAL, METRICS, batch_name, check_files, run_files
from rollouts.runs.reading import reading
from rollouts.runs.run_history import RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.settings import Change, changes, recorded_settings
from rollouts.runs.start import SETTINGS, identity_of, settings_in
from rollouts.runs.writer import RunWriter, now
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.manager_state import ManagerState
from rollouts.training.metrics import Accounting
from rollouts.training.rollout_attempt import is_lost
from rollouts.training.types import Group, Sample

__all__ = ["Reopened", "compared", "reopen", "state_of_history"]

CHANGED = "changed"


@attrs.frozen
class Reopened:
    """A run ready to continue."""

    writer: RunWriter
    run_journal: RunJournal
    state: ManagerState
    history: RunHistory
    restored: tuple[str, ...] = ()
    """The files that were written from the journal, each with the reason."""
    changed: tuple[Change, ...] = ()
    """The settings that were allowed to differ."""
    unrecorded: tuple[str, ...] = ()
    """The settings that the run does not have, so that they were not compared."""
    torn: TornTail | None = None
    """The end of the journal that was cut."""


def reopen(path: Path, description: Mapping[str, Any], buffer: DataBuffer, *, allow_changes: bool = False) -> Reopened:
    """Open a run to resume it: restores the buffer's position, and the files that are missing or damaged.

    Args:
        path: the run's folder.
        description: :meth:`Recipe.describe` of the current recipe; its sizes and data must be those of the run. Its
            entry ``settings``, if any, is compared with that of the run: :func:`rollouts.runs.settings.settings_of`.
        buffer: over the same data.
        allow_changes: accept other settings, and record them in the journal and in ``run.json``.

    Raises:
        ConfigError: there is no run, it has no journal, another process writes to it, or the recipe differs.
        JournalError: the journal is damaged, or cannot be written.
        RolloutsError: the files cannot be written.
    """
    info = read_info(path)
    if not (path / JOURNAL).is_dir():
        raise ConfigError.of("--resume", str(path), "a run with a journal")
    check_files(path)
    with reading(path):
        try:
            return _reopened(path, info, description, buffer, allow_changes)
        except OSError as error:
            text = f"{path}: the run cannot be written: {error}; rollouts run --resume continues it once it can"
            raise RolloutsError(text) from error


def _reopened(
    path: Path, info: Mapping[str, Any], description: Mapping[str, Any], buffer: DataBuffer, allow_changes: bool
) -> Reopened:
    journal = Journal(path / JOURNAL, batches=batches_written(info))
    try:
        info = read_info(path)  # again under the lock: its writer may have ended the run since
        history = RunHistory.read(path / JOURNAL)
        identity, settings = identity_of(description, buffer), settings_in(description)
        if history.runs:
            _check_identity(history.runs[0], identity)
        changed, unrecorded = compared(info, history, settings.get(SETTINGS, {}), allow_changes=allow_changes)
        group_size = identity["n_samples_per_prompt"]
        state = state_of_history(history, buffer, group_size)
        turns = {index: history.read_turns(index) for index in history.turns}
        run_journal = RunJournal(journal, turns)
        segment: dict[str, Any] = (
            {CHANGED: {change.name: [change.then, change.now] for change in changed}} if changed else {}
        )
        segment |= {"torn": attrs.asdict(journal.torn)} if journal.torn is not None else {}
        run_journal.began({**identity, **settings, **segment, "resumed": max(1, len(history.runs))})
        journal.flush()
        writer = RunWriter.reopen(path)
        restored = _synchronize(writer, history, state)
        segment |= {"first_batch": writer.batches, "started": now()} | ({"restored": restored} if restored else {})
        writer.update(segments=[*info.get("segments", ()), segment])
    except BaseException:
        journal.close()
        raise
    return Reopened(writer, run_journal, state, history, tuple(restored), changed, unrecorded, journal.torn)


def compared(
    info: Mapping[str, Any], history: RunHistory, settings: Mapping[str, Any], *, allow_changes: bool
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """The settings that differ from the last segment, and the names of settings that the run lacks.

    Raises:
        ConfigError: a setting differs, and changes are not allowed.
    """
    stored = next((record[SETTINGS] for record in reversed(history.runs) if SETTINGS in record), None)
    then = recorded_settings(info) if stored is None else stored
    then = {"sampler": info.get("sampler") or {}, **then}  # older runs had none
    changed = tuple(changes(then, settings))
    if changed and not allow_changes:
        listed = " · ".join(map(str, changed))
        raise ConfigError(
            f"--resume, settings: {listed}: a resumed run keeps its settings; --allow-changes records them"
        )
    unrecorded = tuple(sorted(settings.keys() - then.keys()))
    return changed, unrecorded


def _check_identity(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if then.get(name) != value:
            expected = "the run's seed and prompts" if name == "data" else repr(then.get(name))
            raise ConfigError.of(f"--resume, {name}", value, f"{expected}: a resumed run keeps its settings")


# -- files ------------------------------------------------------------------------------------------------------------


def _synchronize(writer: RunWriter, history: RunHistory, state: ManagerState) -> list[str]:
    """Write what the files lack, and remove what the journal does not have; returns the files written, with reasons."""
    restored: list[str] = []
    for outcome in ("dropped", "failed"):
        file = writer.path / f"{outcome}.jsonl"
        written = _groups_in(file, history, outcome)
        lacking = [number for number, settled in history.settled.items() if settled[0] == outcome]
        lacking = [number for number in lacking if number not in written]
        for number in lacking:
            writer.on_group(_group(history, number, history.settled[number][1]))
        if lacking:
            restored.append(f"{file.name} ({len(lacking)} groups)")
    (writer.path / "unbatched.jsonl").unlink(missing_ok=True)
    restored += _restore_batches(writer, history)
    if writer.write_metrics([batch.metrics for batch in history.sealed]):
        restored.append(METRICS)
    for number in state.ready:
        writer.on_group(_group(history, number, ""))
    return restored


def _restore_batches(writer: RunWriter, history: RunHistory) -> Iterator[str]:
    """Write the sealed batches that are missing or damaged; yields the file and the reason of each."""
    numbers = {batch_name(number): number for number in range(len(history.sealed))}
    intact: set[int] = set()
    why: dict[int, str] = {}
    for file in (file for outcome, file in run_files(writer.path) if outcome == "kept"):
        path = writer.path / file
        number = numbers.get(path.stem)
        if number is not None and number not in intact:
            fault = _fault_of(path, history, number)
            if fault is None:
                intact.add(number)
                continue
            why[number] = fault
        # A batch without a record, which run.json does not count: its groups are ready again.
        path.rmdir() if path.is_dir() else path.unlink()
    for number, batch in enumerate(history.sealed):
        if number not in intact:
            samples = [sample for group in batch.groups for sample in history.group_samples(group)]
            path = writer.write_samples(number, samples)
            yield f"{path.relative_to(writer.path)} ({why.get(number, 'missing')})"
    if history.sealed:
        writer.update(accounting=history.sealed[-1].accounting)


def _fault_of(path: Path, history: RunHistory, number: int) -> str | None:
    """The fault of the file of a sealed batch; ``None`` if its checksums fit and it has the batch's samples."""
    if path.is_dir():
        return "a folder"
    if path.suffix == ".parquet":
        damage = parquet.damage_in(path)
        if damage is not None:
            return damage
        heads = parquet.heads(path)
    else:
        lines = path.read_bytes().splitlines(keepends=True)
        try:
            if not all(line.endswith(b"\n") and is_sound(line) is not False for line in lines):
                return "damaged (a checksum does not fit)"
            heads = [(head.group_index, head.index) for head in map(_decode_head, lines)]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return f"damaged ({error})"
    expected = [
        (group, index)
        for group in history.sealed[number].groups
        for index in history.settled[group][2]
        for _ in range(history.rollouts[index].whole)
    ]
    return None if heads == expected else "other samples than in the journal"


def _group(history: RunHistory, number: int, reason: str) -> Group:
    outcome = history.settled[number][0]
    samples = tuple(history.group_samples(number))
    return Group(Prompt(samples[0].prompt, group_index=number), samples, outcome, reason)


class _Line(msgspec.Struct):
    group_index: int
    index: int | None = None


_decode_head = msgspec.json.Decoder(_Line).decode


def _groups_in(file: Path, history: RunHistory, outcome: str) -> set[int]:
    """The complete groups of an outcome in a file; cuts the file before the first line that is not of one."""
    complete: set[int] = set()
    end = 0
    if not file.exists():
        return complete
    for number, rows, stop in _runs_of_lines(file):
        settled = history.settled.get(number)
        expected = sum(history.rollouts[index].whole for index in settled[2]) if settled else 0
        if rows != expected or number in complete or settled is None or settled[0] != outcome:
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
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
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
    buffer.resume_after(history.groups, [*history.unsettled, *history.ready], history.draws)
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
        stored = {index - number * group_size: history.samples(index) for index in done}
        # The writer died as it stored a failed group: without the record of the group, it has not failed.
        finished[number] = {position: samples for position, samples in stored.items() if not is_lost(samples)}
        for samples in finished[number].values():
            for sample in samples:
                sample.failure = None
    return ManagerState(
        accounting=accounting,
        batches=len(history.sealed),
        ready={number: history.group_samples(number) for number in history.ready},
        finished=finished,
        attempts=dict(history.attempts),
        totals=history.totals.to_dict(),
    ).with_in_flight_returned()
