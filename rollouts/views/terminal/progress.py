"""Progress of a run on the terminal, its summary at the end, and the tables of stored groups, samples and failures.

Invariant: the display only reads; a run without it is the same run. Each batch has a line that stays. Between them one
panel is redrawn in place on a terminal; elsewhere a plain line is printed every few seconds. A table fits 80 columns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from shlex import quote

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
from rollouts.concurrency.stalls import Stall
from rollouts.runs.run import RunResult
from rollouts.runs.writer import RunWriter
from rollouts.training.config import RolloutConfig
from rollouts.training.manager import AsyncRolloutManager
from rollouts.views.terminal.untrained import untrained_line
from rollouts.views.terminal.waiting import duration, line_of_users, waiting_lines

__all__ = [
    "Progress",
    "batch_line",
    "panel",
    "plain_line",
    "summary",
]

_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 5.0
_TREND = 6
"""Batches whose mean reward the display shows."""
_BATCHES, _GROUPS = 3, 16
"""The batches of a run, or the groups that it dropped, before its advice."""


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
    _advised: bool = attrs.field(default=False, init=False)
    kept_before: int = attrs.field(default=0, init=False)
    """Groups that an earlier process of this run kept."""

    def say(self, text: str | Text, style: str = "dim") -> None:
        """Print a line that stays, unless it is empty; a closed or full output changes nothing in the run."""
        if self.quiet or not text:
            return
        with contextlib.suppress(OSError, ValueError, SystemExit):  # rich raises SystemExit where its pipe is closed
            self.console.print(Text(visible(text), style) if isinstance(text, str) else text, soft_wrap=True)

    def batch(self, numbers: Mapping[str, float]) -> None:
        """Print the metrics of a batch."""
        self.say(batch_line(numbers, self.rewards[-1] if self.rewards else None))
        self.rewards.append(numbers.get("reward/mean", 0.0))
        if self.config is None or len(self._first) == _BATCHES:
            return
        self._first.append(numbers)
        if len(self._first) == _BATCHES:
            from rollouts.views.terminal.advice import slots_advice  # here: most runs have fewer batches

            self.say(slots_advice(self.config, self._first), "yellow")

    def blocked(self, stall: Stall) -> None:
        """Name code of a user that blocks the event loop; called from a thread, while it does."""
        if stall.of_user:
            text = f"the event loop is blocked, {stall.seconds:.1f} s so far, and every rollout waits: "
            expected = "expected await, or anyio.to_thread.run_sync for a call that blocks"
            self.say(f"{text}{line_of_users(stall.place)}; {expected}", "yellow")

    def advise(self, manager: AsyncRolloutManager) -> None:
        """Say once that nearly all of the first groups were dropped, long before the run stops for it."""
        counts = manager.accounting
        if self._advised or counts.dropped < max(_GROUPS, 8 * (counts.in_batch + counts.ready)):
            return
        self._advised = True
        from rollouts.views.terminal.advice import unkept_advice  # here: most runs keep more groups

        self.say(unkept_advice(manager), "yellow")

    async def watch(self, manager: AsyncRolloutManager, *, batches: int) -> None:
        """Display the state of a run until cancelled."""
        self.config = manager.config
        self.kept_before = manager.accounting.in_batch + manager.accounting.ready
        if self.quiet:
            return
        if not self.console.is_terminal:
            while True:
                await anyio.sleep(_LINE_SECONDS)
                self.advise(manager)
                self.console.print(Text(plain_line(manager, batches=batches, progress=self)), soft_wrap=True)

        def drawn() -> Panel:
            return panel(manager, batches=batches, progress=self)

        with Live(drawn(), console=self.console, auto_refresh=False, transient=True) as live:
            while True:
                await anyio.sleep(_REDRAW_SECONDS)
                self.advise(manager)
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
    """The mean tokens of a sample; without token ids the reply tokens that the chat API counted, if it did."""
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
    path = quote(str(writer.path))
    then = [f"rollouts {verb} {path}" for verb in ("show", "view", "check-run")]
    then = [f"rollouts show {path} --failures", *then] if result.accounting.failed else then
    then = then if result.status == "finished" else [f"rollouts run --resume {path}", *then]
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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
