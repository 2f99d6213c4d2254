"""Curation: stored runs to rows of one target, with an account of every rollout.

Laws:

C3. Accounting: each rollout that was read is in a row, or refused for one reason; the numbers add up.
C4. A rollout without a verdict is in no pass rate, and on no side of a pair.
C5. The same runs, selection and target give the same rows in the same order.

Memory grows with the rollouts by some bytes for each distinct one (``select.py``). This module writes nothing.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.curation.duplicates import HeldOut, NearDuplicates
from rollouts.curation.encoding import Student
from rollouts.curation.rows import IGNORED, NEAR, Target, check_target, units_of
from rollouts.curation.select import Selection, Selector
from rollouts.curation.stored import StoredRun, check_runs, text_of
from rollouts.dtypes import Tool
from rollouts.dtypes.lazy_numpy import np
from rollouts.dtypes.tools import tools_json
from rollouts.errors import ConfigError
from rollouts.runs.folder import read_rows
from rollouts.training.prompt_files import rows_of as rows_of_file

__all__ = ["Account", "Curation", "Quantiles", "curate"]

_SAMPLE = 10_000
"""Values of which quantiles are computed."""


class Quantiles:
    """Quantiles of a stream of numbers, from a uniform sample of at most 10,000 of them; the ends are exact."""

    def __init__(self) -> None:
        self.count = 0
        self.least, self.largest = math.inf, -math.inf
        self._kept: list[float] = []
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        self.least, self.largest = min(self.least, value), max(self.largest, value)
        if len(self._kept) < _SAMPLE:
            self._kept.append(value)
        elif (place := self._random.randrange(self.count)) < _SAMPLE:
            self._kept[place] = value

    def at(self, *shares: float) -> list[float]:
        """The values at these shares, 0 to 1; empty without a number."""
        if not self.count:
            return []
        ordered = [self.least, *sorted(self._kept)[1:-1], self.largest]
        return [ordered[round(share * (len(ordered) - 1))] for share in shares]


@attrs.define
class Account:
    """The rollouts that were read, by what became of them."""

    read: int = 0
    written: int = 0
    """Rollouts of at least one row."""
    rows: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    """Rollouts without a row by reason, in the order of the filters."""
    tasks_read: int = 0
    tasks_written: int = 0
    tokens: int = 0
    """Tokens of token rows."""
    trained: int = 0
    """Trained tokens of token rows."""
    reweighted: int = 0
    """Rows of samples whose ``loss_multiplier`` is not 1, which no column has."""
    versions: Counter[str] = attrs.field(factory=Counter)
    """Rows by policy version."""
    rewards: Quantiles = attrs.field(factory=Quantiles)
    lengths: Quantiles = attrs.field(factory=Quantiles)
    """Lengths of token rows, in tokens; of other rows the tokens of the rollout."""

    @property
    def longest(self) -> int:
        """Tokens of the longest row, as in ``lengths``."""
        return int(self.lengths.largest) if self.lengths.count else 0

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain data."""
        names = ("read", "written", "rows", "tasks_read", "tasks_written", "tokens", "trained", "longest", "reweighted")
        counts = {name: getattr(self, name) for name in names}
        return {**counts, "refused": dict(self.refused), "versions": dict(sorted(self.versions.items()))}


class Curation:
    """An iterable of rows. Each iteration reads the runs again and makes the same rows.

    Attributes:
        account: of the last iteration; complete when it has ended.
        held_out_texts: number of the held-out texts.
        common: sequences of words that many of these share, which show no overlap.
    """

    def __init__(
        self, runs: Sequence[StoredRun], target: Target, selection: Selection, student: Student | None = None
    ) -> None:
        self.runs, self.target, self.selection, self.student = runs, target, selection, student
        self.account = Account()
        self._held_out = _held_out(selection.not_in) if selection.not_in else None
        self.held_out_texts = 0 if self._held_out is None else self._held_out.texts
        self.common = 0 if self._held_out is None else self._held_out.common
        self._near = selection.near
        if self._near is not None:
            NearDuplicates(self._near)

    def __repr__(self) -> str:
        return f"<Curation of {len(self.runs)} runs to {self.target}>"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        target, selection = self.target, self.selection
        account = self.account = Account()
        near = None if self._near is None else NearDuplicates(self._near)
        pairs = target == "pairs"
        selector = Selector(self.runs, selection, limits_rollouts=not pairs, held_out=self._held_out)
        without_row: Counter[str] = Counter()
        tasks: set[str] = set()
        units = units_of(
            target,
            selector,
            without_row,
            passing=selection.passing,
            runs=len(self.runs),
            per_task=selection.per_task,
            is_new=None if near is None else near.add,
            student=self.student,
        )
        for unit in units:
            if near is not None and not pairs and not near.add(unit.text):
                without_row[NEAR] += len(unit.rollouts)
                continue
            account.written += len(unit.rollouts)
            tasks.update(rollout.task for rollout in unit.rollouts)
            for row in unit.rows:
                branches = [rollout.branches[row["source"]["branch"]] for rollout in unit.rollouts]
                account.reweighted += any(branch.get("loss_multiplier", 1) != 1 for branch in branches)
                _count(account, row, target, unit.rollouts[0].facts(selection.passing)["tokens"])
                yield row
        account.read, account.refused = selector.read, selector.refused + without_row
        account.tasks_read, account.tasks_written = len(selector.tasks), len(tasks)


def _count(account: Account, row: dict[str, Any], target: Target, length: int) -> None:
    source = row["source"]
    account.rows += 1
    account.rewards.add(source["reward"])
    account.versions.update(source["versions"])
    if target == "tokens":
        length = len(row["input_ids"])
        account.tokens += length
        account.trained += int(np.count_nonzero(np.array(row["labels"]) != IGNORED))
    account.lengths.add(length)


def curate(
    runs: str | Path | Sequence[str | Path],
    target: Target = "tokens",
    selection: Selection | None = None,
    *,
    tokenizer: Any = None,
) -> Curation:
    """Select rollouts of stored runs, and make them rows of a training set.

    Args:
        runs: folders of runs; rollouts of one task (prompt and label) are pooled over them.
        target: the form of the rows; see :mod:`rollouts.curation.rows`.
        selection: the criteria; by default every distinct rollout with a reward of at least 1.
        tokenizer: the name or folder of a student's tokenizer: token rows of text of chat APIs, encoded with it.

    Returns:
        An iterable of rows, whose ``account`` has the number of rollouts by what became of them.

    Raises:
        ConfigError: a run, a held-out file, the target or the selection is invalid, or rensa is missing.
    """
    target = check_target(target)
    selection = selection or Selection()
    if target in ("pairs", "kto") and selection.select not in (None, "all"):
        expected = f'"all" with --to {target}: it needs rollouts that passed, and others'
        raise ConfigError.of("--select", selection.select, expected)
    if tokenizer is not None and target != "tokens":
        raise ConfigError.of("--tokenizer", tokenizer, "none without --to tokens: other rows are text")
    if selection.select is None:
        selection = attrs.evolve(selection, select="correct" if target in ("tokens", "chat") else "all")
    student = None if tokenizer is None else Student(tokenizer)
    return Curation(check_runs(runs, _tools(selection.tools)), target, selection, student)


def _tools(file: str | Path | None) -> str | None:
    if file is None:
        return None
    expected = "a JSON file with a list of tools in chat format"
    try:
        tools = msgspec.json.decode(Path(file).read_bytes())
        if not isinstance(tools, list):
            raise ConfigError.of("--tools", str(file), expected)
        return tools_json(map(Tool.from_chat, tools))
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError.of("--tools", str(file), f"{expected} ({error})") from None


def _held_out(sources: Sequence[str | Path]) -> HeldOut:
    return HeldOut(text for source in sources for text in _texts(source))


def _texts(source: str | Path) -> Iterator[str]:
    """The texts of a held-out source: the prompts of a run, or each text of each row of a file."""
    if (Path(source) / "run.json").is_file():
        seen: set[str] = set()
        for row in read_rows(source, "all"):
            text = _prompt_text(row.data.get("prompt") or "")
            if text not in seen:
                seen.add(text)
                yield text
        return
    for _, data in rows_of_file(source):
        yield from _texts_in(data)


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(text_of(message) for message in prompt if message.get("role") != "system")


def _texts_in(value: Any) -> Iterator[str]:
    """The strings of a row, and its conversations as one text each, without system messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _texts_in(entry)
    elif (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(entry, dict) and "role" in entry for entry in value)
    ):
        yield _prompt_text(value)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts_in(entry)
