"""Progress of a run on the terminal, its summary at the end, and the tables of stored groups, samples and failures.

Invariant: the display only reads; a run without it is the same run. Each batch has a line that stays. Between them one
panel is redrawn in place on a terminal; elsewhere a plain line is printed every few seconds. A table fits 80 columns.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence

import anyio
import attrs
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollouts.base.terminal import visible
from rollouts.concurrency.deadlines import pauses
from rollouts.dtypes import chat_text
from rollouts.runs.failure_kinds import FailureKind, FailureKinds
from rollouts.runs.folder import Row
from rollouts.runs.run import RunResult
from rollouts.runs.writer import RunWriter
from rollouts.testing.stalls import Stall
from rollouts.training.comparisons import by_comparison
from rollouts.training.config import RolloutConfig
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.types import Sample
from rollouts.views.terminal.advice import AFTER, slots_advice
from rollouts.views.terminal.untrained import untrained_line
from rollouts.views.terminal.waiting import duration, line_of_users, waiting_lines

__all__ = [
    "Progress",
    "batch_line",
    "failure_kinds",
    "failures_table",
    "first_failed",
    "groups_table",
    "panel",
    "plain_line",
    "samples_table",
    "summary",
]

_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 5.0
_TREND = 6
"""Batches whose mean reward the display shows."""


@attrs.define(eq=False)
class Progress:
    """The output of a run: a line for each step before the first batch, a line for each batch, and the state between.

    Args:
        console: the output.
        quiet: print nothing.
    """

    console: Console
    quiet: bool = False
    rewards: list[float] = attrs.field(factory=list, init=False)
    """Mean rewards of the batches of this process."""
    config: RolloutConfig | None = attrs.field(default=None, init=False)
    """Of the run; for its advice."""
    _first: list[Mapping[str, float]] = attrs.field(factory=list, init=False)
    kept_before: int = attrs.field(default=0, init=False)
    """Groups that an earlier process of this run kept."""

    def say(self, text: str | Text, style: str = "dim") -> None:
        """Print a line that stays; if the output is closed or full, the run is the same without it."""
        if self.quiet:
            return
        with contextlib.suppress(OSError, ValueError, SystemExit):  # rich raises SystemExit where its pipe is closed
            self.console.print(Text(visible(text), style) if isinstance(text, str) else text, soft_wrap=True)

    def batch(self, numbers: Mapping[str, float]) -> None:
        """Print the metrics of a batch."""
        self.say(batch_line(numbers, self.rewards[-1] if self.rewards else None))
        self.rewards.append(numbers.get("reward/mean", 0.0))
        if self.config is None or len(self._first) == AFTER:
            return
        self._first.append(numbers)
        advice = slots_advice(self.config, self._first) if len(self._first) == AFTER else None
        if advice is not None:
            self.say(advice, "yellow")

    def blocked(self, stall: Stall) -> None:
        """Name code of a user that blocks the event loop; called from a thread, while it does."""
        if stall.of_user:
            text = f"the event loop is blocked, {stall.seconds:.1f} s so far, and every rollout waits: "
            self.say(f"{text}{line_of_users(stall.place)}", "yellow")

    async def watch(self, manager: AsyncRolloutManager, *, batches: int) -> None:
        """Display the state of a run until cancelled."""
        self.config = manager.config
        self.kept_before = manager.accounting.in_batch + manager.accounting.ready
        if self.quiet:
            return
        if not self.console.is_terminal:
            while True:
                await anyio.sleep(_LINE_SECONDS)
                self.console.print(Text(plain_line(manager, batches=batches, progress=self)), soft_wrap=True)

        def drawn() -> Panel:
            return panel(manager, batches=batches, progress=self)

        with Live(drawn(), console=self.console, auto_refresh=False, transient=True) as live:
            while True:
                await anyio.sleep(_REDRAW_SECONDS)
                live.update(drawn(), refresh=True)


def panel(manager: AsyncRolloutManager, *, batches: int, progress: Progress | None = None) -> Panel:
    """The state of a run as a panel."""
    counts, numbers = manager.accounting, manager.run_metrics
    size = manager.config.batch_size
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    done = ProgressBar(total=size, completed=counts.ready)
    bar.add_row(_batch(manager, batches), done, f"{counts.ready}/{size} groups")
    groups = Text.assemble(
        f"{_at_work(manager)} · {counts.ready} ready · ",
        (f"{counts.in_batch + counts.ready} kept", "green"),
        " · ",
        (f"{counts.dropped} dropped", "yellow"),
        " · ",
        (f"{counts.failed} failed", "red" if counts.failed else ""),
    )
    rates = f"{numbers.tokens_per_second:.0f} tokens/s · {_rewards(manager, progress)}"
    body = Table.grid()
    body.add_row(bar)
    body.add_row(groups)
    body.add_row(rates)
    body.add_row(Text("\n".join(waiting_lines()) or "no rollout waits", "dim", overflow="fold"))
    passed = duration(time.monotonic() - numbers.started)
    subtitle = " · ".join([passed, *_time_left(manager, batches, progress)])
    return Panel(body, title="rollouts", subtitle=subtitle, expand=True)


def _batch(manager: AsyncRolloutManager, batches: int) -> str:
    """The batch that is being filled, by its number as in the files, which count from 0."""
    if manager.batches >= batches:
        return f"{batches} of {batches} batches are full"
    at = min(manager.batches + 1, batches)
    return f"batch {at - 1} ({at} of {batches})"


def plain_line(manager: AsyncRolloutManager, *, batches: int, progress: Progress | None = None) -> str:
    """The state of a run in one line."""
    counts, numbers = manager.accounting, manager.run_metrics
    return " · ".join(
        [
            duration(time.monotonic() - numbers.started),
            f"{_batch(manager, batches)}: {counts.ready}/{manager.config.batch_size} groups",
            _at_work(manager),
            f"{counts.in_batch + counts.ready} kept",
            f"{counts.dropped} dropped",
            f"{counts.failed} failed",
            f"{numbers.tokens_per_second:.0f} tokens/s",
            _rewards(manager, progress),
            *_time_left(manager, batches, progress),
            *waiting_lines(1),
        ]
    )


def _at_work(manager: AsyncRolloutManager) -> str:
    """The groups in flight; with slots, the rollouts that run, too."""
    groups = manager.accounting.in_flight
    if manager.slots.count is None:
        return f"{groups} in flight"
    return f"{manager.slots.running} of {manager.slots.count} rollouts · {groups} groups open"


def _rewards(manager: AsyncRolloutManager, progress: Progress | None) -> str:
    """The mean reward of the run, and of its last batches."""
    text = f"mean reward {_number(manager.run_metrics.mean_reward)}"
    trend = [] if progress is None else progress.rewards[-_TREND:]
    return f"{text}, by batch {' '.join(f'{reward:.2f}' for reward in trend)}" if len(trend) > 1 else text


def _time_left(manager: AsyncRolloutManager, batches: int, progress: Progress | None) -> list[str]:
    """How long the rest takes at the pace of this process; nothing before a group is kept, or in an outage."""
    kept = manager.accounting.in_batch + manager.accounting.ready
    here = kept - (0 if progress is None else progress.kept_before)
    left = batches * manager.config.batch_size - kept
    if here <= 0 or left <= 0 or pauses():
        return []
    passed = time.monotonic() - manager.run_metrics.started
    return [f"about {duration(passed * left / here)} left"]


def batch_line(numbers: Mapping[str, float], before: float | None = None) -> Text:
    """The metrics of a batch in one line, and a line for each thing to look at.

    Args:
        numbers: the metrics.
        before: mean reward of the batch before it.
    """
    reward = numbers.get("reward/mean", 0.0)
    change = "" if before is None else f" ({reward - before:+.3f})"
    text = Text(
        f"batch {numbers.get('batch', 0):g}: reward {reward:.3f}{change} · {_lengths(numbers)}"
        f"{numbers.get('turns/mean', 0):.1f} turns · {numbers.get('seconds', 0):.1f} s"
    )
    text.append(visible(_by_seat(numbers)))
    text.append(visible(_faulty_calls(numbers)), "yellow")
    if numbers.get("repeated_prompts"):
        text.append(f"\n  {numbers['repeated_prompts']:g} groups repeat a prompt of this batch: ", "yellow")
        text.append("give more prompts, a smaller batch_size, or epochs=1", "yellow")
    return text


def _lengths(batch: Mapping[str, float]) -> str:
    """The mean tokens of a sample; of texts without token ids, those that the chat API counted, if it did."""
    if batch.get("tokens/mean") or "episode/replies" not in batch:
        return f"{batch.get('tokens/mean', 0):.0f} tokens, {batch.get('sampled_tokens/mean', 0):.0f} trained · "
    counted = batch.get("episode/completion_tokens")
    return "" if counted is None else f"{counted:.0f} reply tokens · "


def _by_seat(batch: Mapping[str, float]) -> str:
    """The mean reward of each seat, and its spread in a group; empty without seats."""
    seats = [name.split("/")[1] for name in batch if name.startswith("seat/") and name.endswith("/reward/mean")]
    means = [f"{one} {batch[f'seat/{one}/reward/mean']:.3f} ± {batch[f'seat/{one}/reward/std']:.3f}" for one in seats]
    return f"\n  by seat: {' · '.join(means)}" if seats else ""


def summary(result: RunResult, writer: RunWriter) -> Text:
    """The summary of a run: accounting of the prompts, totals, files, next commands."""
    numbers = result.run_metrics
    colour = {"finished": "bold green", "stopped": "bold yellow"}.get(result.status, "bold red")
    text = Text()
    text.append(f"{result.status}", colour)
    text.append(f" after {result.seconds:.1f} s: {result.accounting}\n")
    if result.status == "finished" and not result.batch_metrics:
        text.append(
            f"nothing to do: all batches of the run exist ({result.batches}); --batches N asks for more\n", "yellow"
        )
    rate = f"{numbers.sampled_here / max(result.seconds, 1e-9):.0f} tokens/s, " if numbers.sampled_here else ""
    text.append(f"{numbers.rollouts} rollouts, {numbers.sampled_tokens} sampled tokens, {rate}")
    text.append(f"mean reward of all {_number(numbers.mean_reward)}\n")
    if kept := result.accounting.in_batch + result.unbatched:
        settled = kept + result.accounting.dropped + result.accounting.failed
        text.append(f"{settled / kept:.2f} prompts for each kept group\n")
    for reason, count in numbers.reasons.most_common(3):
        text.append(f"not kept: {count} × {visible(reason)}\n")
    text.append(untrained_line(result.batch_metrics), "yellow")
    if result.unbatched:
        text.append(f"{result.unbatched} accepted groups fill no batch; their prompts count as returned: ")
        text.append(visible(f"{writer.path / 'unbatched.jsonl'}\n"))
    text.append(visible(f"files: {writer.path}\n"))
    then = [f"rollouts {verb} {writer.path}" for verb in ("show", "view", "check-run")]
    then = [f"rollouts show {writer.path} --failures", *then] if result.accounting.failed else then
    then = then if result.status == "finished" else [f"rollouts run --resume {writer.path}", *then]
    text.append(visible("next:  " + "\n       ".join(then)))
    return text


def _faulty_calls(batch: Mapping[str, float]) -> str:
    """The tool calls that did not run, by error kind; an empty string if all ran."""
    malformed, unknown = "episode/malformed_tool_calls/", "episode/unknown_tool_calls"
    faults = {name.removeprefix(malformed): mean for name, mean in batch.items() if name.startswith(malformed)}
    faults |= {"unknown tool": batch[unknown]} if unknown in batch else {}
    kinds = ", ".join(f"{mean:.2g} {name}" for name, mean in sorted(faults.items(), key=lambda each: -each[1]) if mean)
    count = batch.get("episode/tool_calls", 0)
    return f"\n  of {count:.2g} tool calls a sample did not run: {kinds}" if kinds else ""


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
        cells: list[str | Text] = [_number(sample.reward), _clipped(status), *map(str, counts), mean]
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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
