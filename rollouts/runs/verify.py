"""Verification of laws 1 to 5 for every sample of a stored run.

Invariant: data that fail their checksum are not used, and derived values are recomputed: a request's checksum from the
tokens before it, the mask from the completions, the accounting from the files. A violation names file, line, sample and
position; one violation is reported for each column of a sample. Law 8 needs the weights: ``logprobs.py``. This module
imports neither the manager nor the agent loop.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.base.storable import to_json, to_plain
from rollouts.base.validators import finite
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, JournalError, shortened
from rollouts.runs.checksums import CHECKSUM
from rollouts.runs.damage import find_damage, is_covered
from rollouts.runs.folder import Row, read_file, whole_size
from rollouts.runs.hashed_files import HashedFiles
from rollouts.runs.images import ImageFolder, hashes_of_row
from rollouts.runs.info import batches_written, note_of_calls, read_info
from rollouts.runs.layout import JOURNAL, METRICS, METRICS_CRC, StoredOutcome, batch_name, run_files
from rollouts.runs.reading import reading
from rollouts.runs.run_history import RunHistory
from rollouts.runs.seat_records import check_seats
from rollouts.runs.tools import ToolFolder
from rollouts.runs.tree_records import check_tree
from rollouts.training.rows import CHAT_API
from rollouts.training.sample_laws import LAWS, Stored, Violation, check_sample, check_stored, reply_key
from rollouts.training.types import Sample

__all__ = ["LAWS", "Report", "Spread", "Violation", "check_sample", "verify_run"]


@attrs.frozen
class Spread:
    """Reward spread within groups, over the groups whose samples all have a reward; each seat counts as a group."""

    groups: int
    with_spread: int
    mean_reward: float
    mean_std: float
    """Mean over groups of the population standard deviation within a group."""

    def __str__(self) -> str:
        rewards = f"mean reward {self.mean_reward:.3f}, mean standard deviation {self.mean_std:.3f}"
        return f"{self.with_spread} of {self.groups} groups have reward spread; {rewards}"


@attrs.define
class Report:
    """The result of a verification."""

    checked: dict[int, Counter[str]] = attrs.field(factory=lambda: {law: Counter() for law in range(1, 6)})
    """For each law, the number of checked samples, completions, tokens, groups, batches."""
    violations: list[Violation] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    """Checks that could not be made, and why."""
    spread: dict[StoredOutcome, Spread] = attrs.field(factory=dict)

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        broken = Counter(violation.law for violation in self.violations)
        lines = []
        for law, found in self.checked.items():
            counts = ", ".join(f"{count} {what}" for what, count in found.items()) or "nothing"
            verdict = f"{broken[law]} violations" if broken[law] else "holds" if found else "not judged"
            lines.append(f"law {law} ({LAWS[law]}): {verdict}, {counts} checked")
        lines += [f"{outcome}: {spread}" for outcome, spread in self.spread.items()]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def verify_run(path: str | Path) -> Report:
    """Check laws 1 to 5 on a stored run, and every checksum of its files.

    Raises:
        ConfigError: there is no run, or it cannot be read.
    """
    path = Path(path)
    with reading(path):
        return _verified(path)


def _verified(path: Path) -> Report:
    try:
        info = read_info(path)
    except ConfigError as error:
        if not (path / "run.json").is_file():
            raise
        return Report(violations=[Violation(4, str(path / "run.json"), error, "what the run wrote")])
    return _Verification(path, info).report


@attrs.frozen
class _Entry:
    """A row with the schema of a stored sample."""

    row: Row
    stored: Stored

    @property
    def place(self) -> str:
        return f"{self.row} (group {self.stored.group_index} · index {self.stored.index})"


class _NamedFiles:
    """The files that samples name by the hash of their bytes: images and lists of tools."""

    def __init__(self, run: Path) -> None:
        self._images = ImageFolder(run)
        self._tools = ToolFolder(run)
        self._checked: set[tuple[str, str]] = set()

    def check(self, row: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
        """Check each file that no earlier row names; yields its kind, and its problem if it has one."""
        tools = row.get("tools")
        named: list[tuple[str, HashedFiles, Any]] = [("images", self._images, one) for one in hashes_of_row(row)]
        named += [("lists of tools", self._tools, tools)] if tools is not None else []
        for kind, folder, sha256 in named:
            if (kind, str(sha256)) not in self._checked:
                self._checked.add((kind, str(sha256)))
                yield kind, folder.problem(sha256)


class _Verification:
    def __init__(self, run: Path, info: dict[str, Any]) -> None:
        self.report = Report()
        self.run = run
        self.info = info
        self.growing = self.info.get("status") == "running"
        self.outcomes: dict[int, StoredOutcome] = {}
        config = self.info.get("config")
        config = config if isinstance(config, dict) else {}
        self.group_size = self._size(config, "n_samples_per_prompt")
        self.batch_size = self._size(config, "batch_size")
        vocab_size = self.info.get("vocab_size")  # runs of 0.1.0 lack it
        self.vocab_size = vocab_size if isinstance(vocab_size, int) else None
        self.requests: dict[str, str] = {}
        self.groups: dict[int, str] = {}
        self.counts: Counter[StoredOutcome] = Counter()
        self.batches = 0
        self.named_files = _NamedFiles(run)
        self.texts = 0
        """The number of samples without token ids, of a chat API."""
        if (note := note_of_calls(info)) is not None:
            self.report.notes.append(note)
        self._check_bits()
        self.history = self._read_journal()
        rewards: dict[StoredOutcome, list[list[float]]] = {}
        for outcome, file in run_files(run, growing=self.growing):
            for members in self._read(outcome, file):
                seats: dict[str, list[float | None]] = {}
                for entry in members:
                    seats.setdefault(entry.stored.seat, []).append(entry.stored.reward)
                scored = [[one for one in scores if one is not None] for scores in seats.values()]
                if all(map(operator.eq, map(len, scored), map(len, seats.values()))):
                    rewards.setdefault(outcome, []).extend(scored)
        self._check_accounting()
        self._check_metrics()
        if self.growing and self.history is not None:
            self.history = self._read_journal()  # the run may have settled more groups since
        if self.history is not None:
            self._check_journal(self.history)
        if self.texts:
            text = "samples are text of a chat API: laws 1, 2, 3 and 8 cannot be judged, because they have no token ids"
            self.report.notes.append(f"{self.texts} {text}")
        self.report.spread = {outcome: _spread(groups) for outcome, groups in rewards.items()}

    def _broken(self, law: int, place: str, got: Any, expected: str) -> None:
        self.report.violations.append(Violation(law, place, got, expected))

    def _size(self, config: dict[str, Any], name: str) -> int:
        value = config.get(name)
        if isinstance(value, int) and value >= 1:
            return value
        self._broken(5, f"{self.run / 'run.json'}, config.{name}", value, "an integer >= 1")
        return 0

    def _check_bits(self) -> None:
        """Check the checksums of every file."""
        if not is_covered(self.info):
            self.report.notes.append(
                "its files have no checksums: a changed bit in text may go unseen (columns and journal are covered)"
            )
            return
        for place, got in find_damage(self.run, growing=self.growing):
            self._broken(4, place, got, "every bit as it was written")

    # -- files and groups --

    def _read(self, outcome: StoredOutcome, file: str) -> Iterator[list[_Entry]]:
        """Check one file; yields its groups."""
        number = None
        if outcome == "kept":
            number, self.batches = self.batches, self.batches + 1
            self.report.checked[5]["batches"] += 1
            name = batch_name(number)
            if Path(file).stem != name:
                self._broken(5, str(self.run / file), Path(file).stem, f"{name}: batches are numbered without a gap")
        entries = self._entries(outcome, file, number)
        last = -1
        groups = 0
        unfinished = self._unfinished(outcome, file)
        for group_index, members in itertools.groupby(entries, key=lambda entry: entry.stored.group_index):
            group = list(members)
            if group_index == unfinished:
                break
            groups += 1
            if outcome == "kept" and group_index < last:
                self._broken(5, group[0].place, f"group {group_index} after group {last}", "groups in order")
            last = group_index
            self._check_group(group, outcome)
            self._check_copy(group)
            yield group
        if outcome == "kept" and self.batch_size and groups != self.batch_size:
            self._broken(5, str(self.run / file), f"{groups} groups", f"{self.batch_size}, the batch size")

    def _unfinished(self, outcome: StoredOutcome, file: str) -> int | None:
        """The group before an unfinished append of a growing run; the append may belong to it, so it is not checked."""
        path = self.run / file
        if not self.growing or outcome == "kept" or not path.is_file():
            return None
        end, size = whole_size(path), path.stat().st_size
        if end >= size:
            return None
        self.report.notes.append(
            f"{path} ends with {size - end} bytes of an unfinished append, and rollouts run --resume writes it again"
        )
        rows = read_file(self.run, outcome, file, growing=True)
        last = None
        with contextlib.suppress(ConfigError):
            for row in rows:
                last = row.data.get("group_index")
        return last if isinstance(last, int) else None

    def _entries(self, outcome: StoredOutcome, file: str, batch: int | None) -> Iterator[_Entry]:
        try:
            for row in read_file(self.run, outcome, file, growing=self.growing):
                try:
                    entry = _Entry(row, msgspec.convert(row.data, Stored))
                except msgspec.ValidationError as error:
                    self._broken(4, str(row), f"a row that is not a stored sample ({error})", "what the run wrote")
                    continue
                self._check_sample(entry, "kept" if outcome in ("kept", "unbatched") else outcome, batch)
                yield entry
        except ConfigError as error:
            self._broken(4, str(self.run / file), error, "rows as the run wrote them")

    def _check_group(self, group: Sequence[_Entry], outcome: StoredOutcome) -> None:
        """Check law 5 on one group, and that the group is stored once."""
        head = group[0]
        number = head.stored.group_index
        self.counts[outcome] += 1
        self.report.checked[4]["groups"] += 1
        self.report.checked[5]["groups"] += 1
        if number in self.groups:
            self._broken(4, head.place, f"group {number} again", f"one place for it, and {self.groups[number]} has it")
        self.groups[number] = str(head.row)
        self.outcomes[number] = outcome
        for entry in group:
            for name in ("prompt", "label"):
                if getattr(entry.stored, name) != getattr(head.stored, name):
                    self._broken(5, f"{entry.place}, {name}", "another", f"that of {head.row}: one prompt a group")
            if entry.stored.rollout_id != entry.stored.index:
                got = f"rollout_id {entry.stored.rollout_id}"
                self._broken(5, entry.place, got, "the index, shared by the branches of one rollout only")
        if not self.group_size:
            return
        indices = [entry.stored.index for entry in group]
        first = number * self.group_size
        whole = list(range(first, first + self.group_size))
        rollouts = [index for index, _ in itertools.groupby(indices)]
        self._check_branches(group)
        if rollouts != (whole if outcome != "failed" else [index for index in whole if index in indices]):
            expected = (
                f"{first} to {whole[-1]} in order, {'each at most once' if outcome == 'failed' else 'none missing'}"
            )
            self._broken(5, head.place, f"indices {rollouts}", expected)

    def _check_branches(self, group: Sequence[_Entry]) -> None:
        """Check law 3 on a forked history: no reply is trained in two branches of one rollout."""
        for _, members in itertools.groupby(group, key=lambda entry: entry.stored.index):
            branches = list(members)
            rows = [(entry.stored, entry.row.data.get("metadata"), entry.place) for entry in branches]
            if seated := check_seats(rows, self._broken):
                self.report.checked[4]["conversations of seats"] += seated
            if shared := check_tree([(entry.stored, entry.place) for entry in branches], self._broken):
                self.report.checked[3]["branches"] += shared
            for _, of_one in itertools.groupby(
                branches, key=lambda entry: (entry.stored.seat, entry.stored.conversation)
            ):
                self._check_session(list(of_one))
            if branches[0].stored.history != "fork":
                continue  # a custom generate function: two of its sequences may sample equal replies from one prefix
            replies: dict[tuple[Any, ...], _Entry] = {}
            for entry in branches:
                for number, call in enumerate(entry.stored.completions):
                    first = replies.setdefault(reply_key(entry.stored, call), entry)
                    if first is not entry:
                        place = f"{entry.place}, call {number}, positions {call.start} to {call.stop}"
                        self._broken(3, place, "trained again", f"once, and {first.row} trains this request's reply")

    def _check_session(self, branches: Sequence[_Entry]) -> None:
        """Check law 3 on the rollout of a program: what its session sampled is trained in one branch, or counted.

        Two calls of a session may have equal prompts and replies, so that replies are not compared.
        """
        metrics = branches[-1].stored.metrics
        if "sampled_tokens" not in metrics:  # no program, or a run of an earlier version
            return
        self.report.checked[3]["rollouts of programs"] += 1
        trained = sum(sum(entry.stored.loss_mask) for entry in branches)
        counted = sum(finite(amount) or 0 for name, amount in metrics.items() if name.startswith("untrained_tokens/"))
        if trained + counted != metrics["sampled_tokens"]:
            got = f"{trained} trained in {len(branches)} branches and {counted:g} counted as untrained"
            expected = f"{metrics['sampled_tokens']}, the tokens that its session sampled"
            self._broken(3, branches[-1].place, got, expected)

    def _check_accounting(self) -> None:
        """Check law 4: the accounting in run.json against its sum and against the files."""
        place = f"{self.run / 'run.json'}, accounting"
        numbers = self.info.get("accounting")
        if self.info.get("status") == "running":
            self.report.notes.append(
                "run.json has no end of the run (it is active or was killed): accounting not compared"
            )
            return
        names = ("taken", "in_flight", "ready", "in_batch", "dropped", "failed", "returned")
        if not isinstance(numbers, dict) or any(not isinstance(numbers.get(name), int) for name in names):
            self._broken(4, place, numbers, f"the numbers {', '.join(names)}")
            return
        total = sum(numbers[name] for name in names[1:])
        self.report.checked[4]["prompts taken"] = numbers["taken"]
        if numbers["taken"] != total:
            self._broken(4, f"{place}.taken", numbers["taken"], f"{total}, the sum of the others")
        counted = {
            "in_batch": self.counts["kept"],
            "dropped": self.counts["dropped"],
            "failed": self.counts["failed"],
            "in_flight": 0,
        }
        for name, count in counted.items():
            if numbers[name] != count:
                self._broken(4, f"{place}.{name}", numbers[name], f"{count}, the groups that the files hold")
        unbatched = self.counts["unbatched"]
        if numbers["ready"] not in (0, unbatched) or numbers["ready"] + numbers["returned"] < unbatched:
            got = f"{numbers['ready']} ready, {numbers['returned']} returned"
            self._broken(4, place, got, f"one of them to count the {unbatched} accepted groups that are in no batch")
        if self.info.get("batches") != self.batches:
            self._broken(4, f"{self.run / 'run.json'}, batches", self.info.get("batches"), f"{self.batches} files")

    def _check_metrics(self) -> None:
        """Check law 4: ``metrics.jsonl`` has the lines that the run wrote, one for each batch."""
        path = self.run / METRICS
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        except OSError as error:
            self._broken(4, str(path), error, "a file of lines")
            return
        batches = self.info.get("batches", 0)
        if self.growing:  # the run may have written a line that run.json does not count yet
            lines = lines[:batches] if isinstance(batches, int) else lines
        crc = zlib.crc32(b"".join(lines))
        if len(lines) != batches:
            self._broken(4, str(path), f"{len(lines)} lines", f"{batches}, one for each batch")
        elif is_covered(self.info) and self.info.get(METRICS_CRC, crc) != crc:
            self._broken(4, str(path), "other lines", "the lines that the run wrote (by the checksum in run.json)")
        elif self.history is not None:
            for number, (line, batch) in enumerate(zip(lines, self.history.sealed, strict=False)):
                if _decoded(line) != _decoded(to_json(batch.metrics)):
                    self._broken(4, f"{path}, line {number + 1}", "other values", "those of the journal")

    def _read_journal(self) -> RunHistory | None:
        path = self.run / JOURNAL
        if not path.is_dir():
            self.report.notes.append("the run has no journal: it cannot be resumed, and its files are not compared")
            return None
        try:
            return RunHistory.read(path, batches_written(self.info) if self.growing else None)
        except JournalError as error:
            self._broken(4, str(path), error, "records as they were written")
            return None

    def _check_copy(self, group: Sequence[_Entry]) -> None:
        """Check law 4: the samples of a group equal the ones in the journal."""
        number = group[0].stored.group_index
        if self.history is None or number not in self.history.settled:  # reported by _check_journal
            return
        try:
            copies = self.history.group_samples(number)
        except (ConfigError, JournalError, KeyError) as error:
            self._broken(4, str(self.run / JOURNAL), f"group {number}: {error!r}", "the samples of each settled group")
            return
        self.report.checked[4]["samples equal to the journal's"] += len(group)
        if len(copies) != len(group):
            self._broken(4, group[0].place, f"{len(group)} samples", f"{len(copies)}, as in the journal")
            return
        for entry, copy in zip(group, copies, strict=True):
            try:
                sample = entry.row.sample()
            except ConfigError as error:
                self._broken(4, entry.place, error, "a sample")
                continue
            differing = list(_differing(sample, copy))
            if differing:
                name, got, expected = differing[0]
                more = f" (and {', '.join(name for name, _, _ in differing[1:])})" if differing[1:] else ""
                self._broken(4, f"{entry.place}, {name}", got, f"{shortened(expected)}, as in the journal{more}")

    def _check_journal(self, history: RunHistory) -> None:
        """Check law 4: the files contain the settled groups of the journal, and no others."""
        path = self.run / JOURNAL
        self.report.checked[4]["settled groups in the journal"] = len(history.settled)
        ahead = []
        for number, stored in self.outcomes.items():
            settled = history.settled.get(number)
            outcome = "kept" if stored == "unbatched" else stored
            if settled is None or settled[0] != outcome:
                if self.growing and stored != "kept":
                    ahead.append(number)
                    continue
                got = f"group {number} is {settled[0] if settled else 'not settled'}"
                self._broken(4, str(path), got, f"{outcome}, as in {self.groups[number]}")
        if ahead:
            self.report.notes.append(
                f"groups {ahead[:10]} are in a file and not in the journal, whose end was lost with the machine: "
                "rollouts run --resume plays them again"
            )
        missing = [number for number in history.settled if number not in self.outcomes]
        if missing and not self.growing:
            self._broken(4, str(path), f"groups {missing[:10]} are settled", "each in one of the run's files")
        if history.torn is not None:
            self.report.notes.append(
                f"the end of the journal is torn, and rollouts run --resume cuts it: {history.torn}"
            )
        if self.growing:
            finished = sum(number // max(1, self.group_size) not in history.settled for number in history.rollouts)
            self.report.notes.append(
                f"the journal has {len(missing)} settled groups that no file has yet, and of groups in flight "
                f"{finished} finished rollouts and {len(history.turns)} with turns: rollouts run --resume continues"
            )

    # -- one sample --

    def _check_sample(self, entry: _Entry, outcome: str, batch: int | None) -> None:
        stored = entry.stored
        checked = self.report.checked
        if not stored.tokens and CHAT_API in (entry.row.data.get("metadata") or {}):
            self.texts += 1
        else:
            checked[1].update(samples=1, completions=len(stored.completions))
            checked[2].update(samples=1, tokens=len(stored.tokens))
            checked[3].update(samples=1, completions=len(stored.completions))
        checked[4].update(samples=1)
        checked[5].update(samples=1)
        self.report.violations += check_stored(stored, entry.place, self.vocab_size)
        for kind, problem in self.named_files.check(entry.row.data):
            checked[4][kind] += 1
            if problem is not None:
                self._broken(4, entry.place, problem, "every bit as it was written")
        row = str(entry.row)
        repeated = None
        for call in stored.completions:
            if repeated is None and call.request_id in self.requests:  # one is reported for each sample
                repeated = call.request_id
                expected = f"one sample for each request, and {self.requests[repeated]} has it"
                self._broken(3, entry.place, f"request {repeated} again", expected)
            self.requests[call.request_id] = row
        if (stored.outcome, stored.batch) != (outcome, batch):
            got = f"outcome {stored.outcome!r}, batch {stored.batch}"
            self._broken(4, entry.place, got, f"outcome {outcome!r}, batch {batch}, as the file is named")


def _differing(sample: Sample, copy: Sample) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and values of each field in which a stored sample is not its copy in the journal."""
    names = ("tokens", "loss_mask", "rollout_log_probs")
    for name, column, other in zip(names, sample.columns, copy.columns, strict=True):
        if column is None or other is None:
            if column is not other:
                yield name, column, other
        elif not np.array_equal(column, other, equal_nan=column.dtype.kind == "f"):
            position = next((p for p in range(min(len(column), len(other))) if column[p] != other[p]), None)
            if position is None:
                yield name, f"{len(column)} values", f"{len(other)} values"
            else:
                yield f"{name}, position {position}", column[position].item(), other[position].item()
    fields, others = (_decoded(to_json(each.fields_to_dict())) for each in (sample, copy))
    for name in fields:
        got, expected = fields[name], others.get(name)
        if got == expected:
            continue
        lists = isinstance(got, list) and isinstance(expected, list)
        if lists and len(got) != len(expected):
            yield name, f"{len(got)} entries", f"{len(expected)} entries"
        elif to_plain(got) != to_plain(expected):  # the journal has integers beyond 64 bits as text
            yield name, got, expected


def _decoded(text: bytes) -> Any:
    value = msgspec.json.decode(text)
    if isinstance(value, dict):
        value.pop(CHECKSUM, None)
    return value


def _spread(groups: Sequence[Sequence[float]]) -> Spread:
    deviations = [_or_infinite(statistics.pstdev, rewards) for rewards in groups]
    return Spread(
        groups=len(groups),
        with_spread=sum(deviation > 1e-6 for deviation in deviations),
        mean_reward=_or_infinite(statistics.fmean, [reward for rewards in groups for reward in rewards]),
        mean_std=_or_infinite(statistics.fmean, deviations),
    )


def _or_infinite(statistic: Callable[[Sequence[float]], float], numbers: Sequence[float]) -> float:
    """A statistic of numbers; infinite if its sum does not fit a float."""
    try:
        return statistic(numbers)
    except OverflowError:
        return math.inf
