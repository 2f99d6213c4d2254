"""The judgement of a foreign dump: the laws of ``rollouts check-run``, as far as the dump allows them to be judged.

Invariant: a finding names row, position, value and rule. A check that no row of the dump permits is listed with the
reason, and never passes silently. There are two kinds of findings:

1. Broken: no reading of the dump makes the value right, such as a trained token without a logprob.
2. Unusual: a policy that some systems have, such as a reply whose end is not trained.

Memory grows by some hundred bytes for each rollout, not with its tokens.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from rollouts.audit.model_tokens import ModelTokens
from rollouts.audit.rows import CHECKS, AuditedRow, Check, Finding, Reader, Span
from rollouts.audit.weights import TrainerLogprobs, Weights
from rollouts.dtypes import digest
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.training.column_digests import column_digests
from rollouts.training.sample_laws import Stored, StoredCompletion, check_stored, reply_key

__all__ = ["MOST_FINDINGS", "AuditReport", "audit"]

_INT32 = 1 << 31

MOST_FINDINGS = 1000
"""The findings of a kind that a report keeps; the others are counted."""


@attrs.define
class AuditReport:
    """The result of an audit."""

    rows: int = 0
    tokens: int = 0
    judged: Counter[Check] = attrs.field(factory=Counter)
    """How many rows, or groups, each check judged."""
    broken: Counter[Check] = attrs.field(factory=Counter)
    unusual: Counter[Check] = attrs.field(factory=Counter)
    findings: list[Finding] = attrs.field(factory=list)
    """The first of each kind, at most :data:`MOST_FINDINGS`."""
    reasons: dict[Check, str] = attrs.field(factory=dict)
    """Why a check cannot be judged, for each of them that judged nothing."""
    notes: list[str] = attrs.field(factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return not self.broken

    def add(self, finding: Finding) -> None:
        counts = self.broken if finding.kind == "broken" else self.unusual
        counts[finding.check] += 1
        if counts.total() <= MOST_FINDINGS:
            self.findings.append(finding)

    def __str__(self) -> str:
        lines = [f"{self.rows} rows, {self.tokens} tokens"]
        for check, (law, rule, _) in CHECKS.items():
            if check in self.reasons:
                lines.append(f"law {law} ({check}) cannot be judged: {self.reasons[check]}")
                continue
            verdict = ", ".join(
                f"{counts[check]} {kind}"
                for kind, counts in (("broken", self.broken), ("unusual", self.unusual))
                if counts[check]
            )
            lines.append(f"law {law} ({check}): {verdict or 'holds'}, {self.judged[check]} judged: {rule}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for ``--json``."""
        return {
            "ok": self.ok,
            "rows": self.rows,
            "tokens": self.tokens,
            "checks": {
                check: {
                    "law": law,
                    "rule": rule,
                    "judged": self.judged[check],
                    "broken": self.broken[check],
                    "unusual": self.unusual[check],
                    "cannot_judge": self.reasons.get(check),
                }
                for check, (law, rule, _) in CHECKS.items()
            },
            "findings": [
                {
                    "kind": one.kind,
                    "law": one.violation.law,
                    "check": one.check,
                    "place": one.violation.place,
                    "got": one.violation.got,
                    "expected": one.violation.expected,
                }
                for one in self.findings
            ],
            "notes": self.notes,
        }


def audit(
    path: str | Path,
    reader: Reader,
    *,
    model_tokens: ModelTokens | None = None,
    weights: Weights | None = None,
    dtype: str | None = None,
) -> AuditReport:
    """Judge a dump.

    Args:
        path: a file, or a folder whose files with the format's suffixes are read in the order of their names.
        reader: of its format.
        model_tokens: of its model, for texts, roles and the vocabulary.
        weights: of the policy that sampled it.
        dtype: of the trainer, where the dump has its logprobs; bfloat16 by default.

    Raises:
        ConfigError: there is no file, or the first row of a file is not of the format.
    """
    judge = _Judge(reader, model_tokens, weights, dtype)
    for number, file in enumerate(_files(Path(path), reader)):
        for row in reader.read(file):  # systems number rollouts by file
            row.group = None if row.group is None else (number, row.group)
            row.rollout = None if row.rollout is None else (number, row.rollout)
            judge.see(row)
        judge.end_file(file)
    return judge.end()


def _files(path: Path, reader: Reader) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.name.endswith(reader.suffixes) and file.is_file())
    if not found:
        raise ConfigError.of("FILE", str(path), f"a file, or a folder with files {', '.join(reader.suffixes)}")
    return found


@attrs.define
class _Group:
    """The rollouts of a group so far."""

    place: str
    marks: dict[Hashable, tuple[str, set[int], set[int]]] = attrs.field(factory=dict)
    """The place of each rollout, and checksums of the prompts and labels of its rows."""
    pairs: list[tuple[float, float]] = attrs.field(factory=list)
    """Reward and advantage of each row, where the dump has both."""
    may_be_cut: bool = False
    """Whether it is the first of several in a log of the last rows."""


class _Judge:
    def __init__(
        self, reader: Reader, model_tokens: ModelTokens | None, weights: Weights | None, dtype: str | None
    ) -> None:
        self.report = AuditReport()
        self._reader = reader
        self._weights = weights
        self._trainer = TrainerLogprobs(dtype)
        self._model_tokens = model_tokens
        vocabulary = model_tokens if weights is None else weights
        self._vocab_size = None if vocabulary is None else vocabulary.vocab_size
        self._groups: dict[Hashable, _Group] = {}
        self._seen: dict[Hashable, str] = {}
        """The place of each rollout's columns, by their checksum."""
        self._replies: dict[Hashable, str] = {}
        """The place of each trained reply, by rollout and checksum."""
        self._rollouts: Counter[Hashable] = Counter()
        self._sequences: Counter[Hashable] = Counter()
        """The number of different rows of each rollout."""
        self._again: list[tuple[Hashable, str, str]] = []
        """Rollout and place of a row, and the place of an equal row of that rollout."""
        self._first: _Group | None = None
        """The first group of the file."""
        self._file = 0
        """A checksum of the columns of the file's rows so far."""
        self._files: dict[int, str] = {}
        """The name of each file with token columns, by its checksum."""

    def see(self, row: AuditedRow) -> None:
        """Judge one row."""
        report = self.report
        report.rows += 1
        for finding in row.findings:
            report.add(finding)
        report.judged.update(row.judged)
        self._check_rewards(row)
        self._check_group(row)
        again = self._check_again(row)
        if row.tokens is None:
            return
        report.tokens += len(row.tokens)
        stored = self._check_columns(row)
        if stored is None:
            return
        spans = [(call.start, call.stop) for call in stored.completions]
        if not again and row.rollout is not None and "once" not in self._reader.lacks:
            self._check_once(row, stored)
        self._check_texts(row)
        if self._model_tokens is not None and self._model_tokens.why is None and spans:
            report.judged["roles"] += 1
            self._add(self._model_tokens.check_roles(row.place, row.tokens, spans, ended=row.ended))
        self._check_logprobs(row, spans)

    def _add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.report.add(finding)

    def _find(self, kind: Any, check: Check, place: str, got: Any, expected: str) -> None:
        self.report.add(Finding.of(kind, check, place, got, expected))

    # -- columns --

    def _check_columns(self, row: AuditedRow) -> Stored | None:
        """Check laws 1 and 2 on the columns; ``None`` if they are broken."""
        if row.mask is None or row.tokens is None:
            return None
        judged = self.report.judged
        judged["mask"] += 1
        judged["logprobs"] += row.logprobs is not None
        judged["vocabulary"] += self._vocab_size is not None
        stored = _stored(row)
        violations = check_stored(stored, row.place, self._vocab_size)
        for violation in violations:
            columns: Check = "logprobs" if "rollout_log_probs" in violation.place else "mask"
            self.report.add(Finding("broken", "vocabulary" if violation.law == 1 else columns, violation))
        if violations:
            return None
        if row.trained and not any(row.mask):
            self._find("unusual", "mask", f"{row.place}, loss_mask", "no 1", "a trained token in a row that is trained")
        if row.logprobs is not None:
            self._check_values(row, row.logprobs)
        return stored

    def _check_values(self, row: AuditedRow, logprobs: Sequence[float | None]) -> None:
        """Find logprobs that are sound by themselves and together are not those of a policy."""
        mask = row.mask or ()
        trained = [value for value, one in zip(logprobs, mask, strict=True) if one]
        if len(trained) > 1 and not any(trained):
            self._find("unusual", "logprobs", row.place, f"0 for all {len(trained)} trained tokens", "values below 0")
        at = next((at for at, (value, one) in enumerate(zip(logprobs, mask, strict=True)) if value and not one), None)
        if at is not None:
            where = f"{row.place}, rollout_log_probs, position {at}"
            self._find("unusual", "logprobs", where, logprobs[at], "0, since the mask is 0")

    def _check_texts(self, row: AuditedRow) -> None:
        if self._model_tokens is None or row.tokens is None:
            return
        plain = self._model_tokens.plain
        for start, stop, text in row.texts:
            self.report.judged["text"] += 1
            if "\N{REPLACEMENT CHARACTER}" in text:
                continue
            if plain(text) not in plain(self._model_tokens.codec.decode(row.tokens[start:stop])):
                where = f"{row.place}, positions {start} to {stop}"
                self._find("broken", "text", where, repr(text[:60]), "the text of these ids, or a part of it")

    def _check_once(self, row: AuditedRow, stored: Stored) -> None:
        """Check law 3: no reply is trained in two branches of one rollout."""
        self._rollouts[row.rollout] += 1
        for call in stored.completions:
            key = hash((row.rollout, reply_key(stored, call)))
            first = self._replies.setdefault(key, row.place)
            if first != row.place:
                where = f"{row.place}, positions {call.start} to {call.stop}"
                self._find("broken", "once", where, "trained again", f"once, and {first} trains this reply")

    def _check_logprobs(self, row: AuditedRow, spans: list[Span]) -> None:
        if row.logprobs is None or not spans or row.has_images or spans[0][0] == 0:
            return
        check = self._trainer if self._weights is None and row.trainer_logprobs is not None else self._weights
        if check is None:
            return
        self.report.judged["weights"] += 1
        finding = check.check(row, spans)
        if finding is not None:
            self.report.add(finding)

    # -- rollouts and groups --

    def _check_rewards(self, row: AuditedRow) -> None:
        """Check law 4: rewards are numbers, and no failure is trained with one."""
        judged = self.report.judged
        judged["failures"] += row.has_status
        if row.rewards is None:
            return
        judged["rewards"] += 1
        numbers = [reward for reward in row.rewards if reward is not None]
        wrong = next((reward for reward in numbers if not math.isfinite(reward)), None)
        if wrong is not None:
            self._find("broken", "rewards", f"{row.place}, reward", wrong, "a finite number")
        elif len(numbers) < len(row.rewards) and row.failed is None:
            self._find("unusual", "rewards", f"{row.place}, reward", None, "a number, since the rollout did not fail")
        if row.failed is not None and row.trained and numbers and (row.mask is None or any(row.mask)):
            got = f"reward {numbers[0]:g} of a failed rollout that is trained ({row.failed})"
            self._find("broken", "failures", row.place, got, "no reward, or a rollout that is not trained")

    def _check_again(self, row: AuditedRow) -> bool:
        """Check law 4: whether a rollout with these columns was read before."""
        columns = [row.tokens, row.mask, row.logprobs, row.texts, row.rewards]
        checksum = zlib.crc32(repr(columns).encode())
        if row.tokens is not None and row.logprobs is not None:
            self._file = zlib.crc32(checksum.to_bytes(4, "little"), self._file)
        if row.rollout is None:
            return False
        self.report.judged["rows"] += 1
        key = hash((row.rollout, checksum))
        first = self._seen.setdefault(key, row.place)
        if first == row.place:
            self._sequences[row.rollout] += 1
            return False
        self._again.append((row.rollout, row.place, first))
        return True

    def _find_again(self) -> None:
        """Find rows that are stored twice. Agents of one rollout that are asked the same may reply the same."""
        for rollout, place, first in self._again:
            kind = "broken" if self._sequences[rollout] == 1 else "unusual"
            self._find(kind, "rows", place, "the same rollout again", f"one row for it, and {first} is it")

    def end_file(self, file: Path) -> None:
        """Check law 4 for a file: that no other one has its rows. Columns with logprobs are not sampled twice."""
        if self._file:
            first = self._files.setdefault(self._file, file.name)
            if first != file.name:
                self._find("broken", "rows", file.name, "the rows of another file", f"rows that {first} does not have")
        self._file, self._first = 0, None

    def _check_group(self, row: AuditedRow) -> None:
        if row.group is None:
            return
        group = self._groups.setdefault(row.group, _Group(row.place))
        self._first = self._first or group
        if group is not self._first and self._reader.keeps_last:
            self._first.may_be_cut = True
        rollout = self.report.rows if row.rollout is None else row.rollout
        _, *marks = group.marks.setdefault(rollout, (row.place, set(), set()))
        for value, found in zip((row.prompt, row.label), marks, strict=True):
            found.add(zlib.crc32(repr(value).encode()))
        if row.advantage is not None:
            (reward,) = row.rewards if row.rewards is not None and len(row.rewards) == 1 else (None,)
            group.pairs.append((math.nan if reward is None else reward, row.advantage))

    def _check_prompts(self) -> None:
        """Check law 5: rollouts of a group have a prompt and a label in common. Agents of one rollout have others."""
        for group in self._groups.values():
            _, *first = next(iter(group.marks.values()))
            for place, *marks in group.marks.values():
                for name, found, expected in zip(("prompt", "label"), marks, first, strict=True):
                    if not found & expected:
                        said = f"that of {group.place}: one {name} a group"
                        self._find("broken", "groups", f"{place}, {name}", f"another {name}", said)

    def _check_sizes(self) -> None:
        """Check law 5: groups have one size, that of most of them."""
        if len(self._groups) < 2:
            return
        sizes = Counter(len(group.marks) for group in self._groups.values())
        usual, count = sizes.most_common(1)[0]
        if usual == 1 and count == len(self._groups):
            return
        self.report.judged["groups"] += len(self._groups)
        kind = "broken" if self._reader.fixed_groups and 2 * count > len(self._groups) else "unusual"
        for group in self._groups.values():
            if len(group.marks) != usual:
                got = f"a group of {len(group.marks)} rollouts"
                self._find(kind, "groups", group.place, got, f"{usual}, as {count} of {len(self._groups)} groups")

    def _check_advantages(self) -> None:
        """Check law 5: advantages of a group sum to 0 and order as its rewards, as those of GRPO do."""
        for group in self._groups.values():
            if not group.pairs:
                continue
            self.report.judged["advantages"] += 1
            rewards, advantages = (np.array(column) for column in zip(*group.pairs, strict=True))
            if not np.isfinite(advantages).all():
                self._find("broken", "advantages", group.place, "an advantage that is not finite", "finite numbers")
                continue
            scale = max(1e-6, float(np.abs(advantages).max()))
            if abs(float(advantages.mean())) > 1e-2 * scale:
                got = f"a mean of {advantages.mean():.3g} over {len(advantages)} rows"
                kind = "unusual" if group.may_be_cut else "broken"
                self._find(kind, "advantages", group.place, got, "0: the reward minus the group's mean")
            elif np.isfinite(rewards).all() and len(rewards) > 1 and not _proportional(rewards, advantages):
                expected = "advantages in proportion to the rewards minus their mean"
                self._find("unusual", "advantages", group.place, "others", expected)

    # -- the end --

    def end(self) -> AuditReport:
        """The report, after the last row."""
        report = self.report
        self._find_again()
        self._check_prompts()
        self._check_sizes()
        self._check_advantages()
        if self._weights is not None and self._weights.total.tokens:
            finding = self._weights.check_mean()
            if finding is not None:
                report.add(finding)
            report.notes.append(f"{self._weights.total} ({self._weights.dtype})")
        elif self._trainer.total.tokens:
            report.notes.append(f"{self._trainer.total} ({self._trainer.dtype})")
        report.judged["once"] = sum(count > 1 for count in self._rollouts.values())
        for check, (_, _, needs) in CHECKS.items():
            if not report.judged[check] and not report.broken[check] and not report.unusual[check]:
                report.reasons[check] = self._reader.lacks.get(check) or self._lacking(check) or _lack(needs)
        return report

    def _lacking(self, check: Check) -> str | None:
        """An option that a check needs."""
        if check == "roles" and self._model_tokens is not None:
            return self._model_tokens.why
        if check == "once" and self._rollouts:
            return "no rollout of the dump has several sequences"
        if check == "groups" and self._groups:
            return "the dump has one group" if len(self._groups) == 1 else "each group of the dump has one rollout"
        options = {
            "text": "--tokenizer DIR",
            "vocabulary": "--tokenizer DIR or --model DIR",
            "roles": "--tokenizer DIR",
        }
        options["weights"] = "--model DIR"
        given = self._model_tokens is not None if check != "weights" else self._weights is not None
        return f"it needs {options[check]}" if check in options and not given and self.report.tokens else None


def _lack(needs: str) -> str:
    return f"no row of the dump has {needs}"


def _proportional(rewards: Any, advantages: Any) -> bool:
    """Whether the advantages are a multiple of the rewards minus their mean, with a factor of at least 0."""
    centred = rewards - rewards.mean()
    spread = float(centred @ centred)
    if not spread:
        return bool(np.abs(advantages).max() <= 1e-3)
    factor = float(centred @ advantages) / spread
    return factor >= 0 and bool(np.abs(advantages - factor * centred).max() <= 1e-2 * max(1.0, abs(factor)))


def _stored(row: AuditedRow) -> Stored:
    """A row as the laws of stored samples read it: each trained span is a completion of the tokens before it."""
    tokens, mask = list(row.tokens or ()), list(row.mask or ())
    logprobs = list(row.logprobs or ())
    if len(logprobs) == len(mask):  # a logprob where the mask is 0 is reported as unusual
        logprobs = [value if one else 0.0 for value, one in zip(logprobs, mask, strict=True)]
    if row.logprobs is None:
        logprobs = [-1.0 if one else 0.0 for one in mask]
    completions = list(_completions(tokens, mask))
    return Stored(
        tokens=tokens,
        loss_mask=mask,
        rollout_log_probs=logprobs,
        completions=completions,
        versions=[("", call.start, call.stop) for call in completions],
        group_index=0,
        index=0,
        rollout_id=0,
        outcome="kept",
        batch=None,
        reward=None,
        prompt=None,
        label=None,
        digests=_digests(tokens, mask, logprobs),
    )


def _completions(tokens: Sequence[int], mask: Sequence[Any]) -> Iterator[StoredCompletion]:
    if tokens and not -_INT32 <= min(tokens) <= max(tokens) < _INT32:  # refused by the laws
        return
    edges = [0, *(at for at in range(1, len(mask)) if bool(mask[at]) != bool(mask[at - 1])), len(mask)]
    crc = position = 0
    for start, stop in itertools.pairwise(edges):
        if start < stop and mask[start]:
            crc = digest(np.array(tokens[position:start], np.int32), crc)
            yield StoredCompletion("", start, stop, crc)
            position = start


def _digests(tokens: Sequence[int], mask: Sequence[Any], logprobs: Sequence[float | None]) -> dict[str, int | None]:
    """The checksums of the columns as they are: a dump stores none. Empty for columns that the laws refuse."""
    if not len(tokens) == len(mask) == len(logprobs) or set(mask) - {0, 1}:
        return {}
    if tokens and not -_INT32 <= min(tokens) <= max(tokens) < _INT32:
        return {}
    ids = np.array(tokens, np.int32)
    values = np.array([math.nan if value is None else value for value in logprobs], np.float32)
    return column_digests(ids, np.array(mask, np.bool_), values)
