"""Tables of stored samples: a run's groups, the samples of a group, and failures by kind.

Invariant: text of a run is shown without control characters, and a long cell is cut. This module reads no file.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from rollouts.base.terminal import visible
from rollouts.dtypes import chat_text
from rollouts.runs.failure_kinds import FailureKind, FailureKinds
from rollouts.runs.folder import Row
from rollouts.training.comparisons import by_comparison
from rollouts.training.types import Sample

__all__ = ["failure_kinds", "failures_table", "first_failed", "groups_table", "samples_table"]


def groups_table(groups: Sequence[Sequence[Row]]) -> Table:
    """One row per group: index, outcome, prompt, rewards, their standard deviation, lengths in tokens, and failure.

    Rewards and deviations are those of each seat in a group of several.
    """
    failed = any(_cause(rows) for rows in groups)
    table = _table("group", "outcome", "prompt", "rewards", "std", "tokens", "trained", *["failure"] * failed)
    for rows in groups:
        samples = [row.sample() for row in rows]
        compared = [_scored(members) for members in by_comparison(samples)]
        lengths = [len(sample) for sample in samples]
        trained = [int(sample.mask_column.sum()) for sample in samples]
        table.add_row(
            Text(visible(str(samples[0].group_index))),
            _outcome(rows[0]),
            _clipped(_prompt_text(samples[0].prompt)[:_LONGEST_CELL]),
            _clipped(" · ".join(" ".join(f"{one:.3g}" for one in rewards) for rewards in compared)[:_LONGEST_CELL]),
            " · ".join(f"{statistics.pstdev(rewards):.2f}" for rewards in compared if rewards),
            f"{min(lengths)}-{max(lengths)}",
            f"{min(trained)}-{max(trained)}",
            *[Text(_cause(rows), "red")] * failed,
        )
    return table


def samples_table(rows: Sequence[Row]) -> Table:
    """One row per sample of a group: its number in the group, its index in the run, its seat, and its metrics."""
    failed, seats = any(_cause([row]) for row in rows), any(row.data.get("seat") for row in rows)
    names = ("reward", "status", "turns", "tokens", "trained", "logprob")
    table = _table("sample", "index", *["seat"] * seats, *names, *["failure"] * failed)
    for number, row in enumerate(rows):
        sample = row.sample()
        mask, logprobs = sample.mask_column, sample.logprob_column
        mean = f"{logprobs[mask].mean():.3f}" if logprobs is not None and mask.any() else ""
        status = f"{sample.status.value} {sample.stop_reason.value if sample.stop_reason else ''}"
        counts = (len(sample.completions), len(sample), int(mask.sum()))
        index = Text(visible(str(sample.index)))
        cells: list[str | Text] = [
            "-" if sample.reward is None else f"{sample.reward:.3f}",
            _clipped(status),
            *map(str, counts),
            mean,
        ]
        seat = [_clipped(f"{sample.seat} {sample.conversation}" if sample.seat else "")] * seats
        table.add_row(str(number), index, *seat, *cells, *[Text(_cause([row]), "red")] * failed)
    return table


def _scored(samples: Sequence[Sample]) -> list[float]:
    return [sample.reward for sample in samples if sample.reward is not None]


def failure_kinds(groups: Iterable[Sequence[Row]]) -> list[FailureKind]:
    """The failures of some groups by kind, the most frequent first."""
    found = FailureKinds()
    for rows in groups:
        for number, row in enumerate(rows):
            sample = row.sample()
            if sample.failure is not None:
                found.add(sample.failure, sample.group_index, number)
    return sorted(found.kinds, key=lambda kind: -kind.count)


def failures_table(kinds: Sequence[FailureKind]) -> Table:
    """One row per kind of failure."""
    table = _table("samples", "cause", "first")
    table.add_column("message", overflow="fold")
    for kind in kinds:
        place = f"group {kind.group}, sample {kind.sample}"
        failure = kind.failure
        table.add_row(str(kind.count), Text(visible(failure.cause), "red"), place, Text(visible(failure.message)))
    return table


def first_failed(rows: Sequence[Row]) -> int:
    """The number of the first failed sample of a group; 0 if none failed."""
    return next((number for number, row in enumerate(rows) if row.data.get("failure")), 0)


_TEXT_COLUMNS = ("outcome", "prompt", "rewards", "seat", "status", "cause", "first", "failure")
_CLIPPED = ("prompt", "rewards", "status")
"""Columns that become narrower where a table is wider than the terminal; the others keep their width."""
_LONGEST_CELL = 48


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right", no_wrap=name not in _CLIPPED)
    return table


def _clipped(text: str) -> Text:
    """A cell of one line, cut with an ellipsis."""
    return Text(visible(text), no_wrap=True, overflow="ellipsis")


def _cause(rows: Sequence[Row]) -> str:
    """The cause of the first failure of some samples; empty if none failed."""
    failures = (row.data["failure"] for row in rows if row.data.get("failure"))
    return next((visible(str(failure.get("cause") or "failed")) for failure in failures), "")


def _outcome(row: Row) -> Text:
    if row.outcome == "kept":
        return Text(visible(f"batch {row.data.get('batch')}"), "green")
    return Text(row.outcome, {"dropped": "yellow", "failed": "red"}.get(row.outcome, "cyan"))


def _prompt_text(prompt: object) -> str:
    if isinstance(prompt, str):
        return " ".join(prompt.split())
    texts = (
        [chat_text(entry.get("content")) for entry in prompt if isinstance(entry, dict)]
        if isinstance(prompt, list)
        else []
    )
    return " ".join((texts[-1] if texts else "").split())
