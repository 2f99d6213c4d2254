"""Progress of a run on the terminal, its summary at the end, and the tables of stored groups and samples.

Invariant: the display only reads; a run without it is the same run. On a terminal one panel is redrawn in place;
elsewhere a plain line is printed every few seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import anyio
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollouts.display.transcript import visible
from rollouts.runs.folder import Row
from rollouts.runs.run import RunResult
from rollouts.runs.writer import RunWriter
from rollouts.training.manager import AsyncRolloutManager

__all__ = ["groups_table", "panel", "plain_line", "samples_table", "summary", "watch"]

_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 5.0


async def watch(manager: AsyncRolloutManager, *, batches: int, console: Console) -> None:
    """Display the progress of a run until cancelled."""
    if not console.is_terminal:
        while True:
            await anyio.sleep(_LINE_SECONDS)
            console.print(Text(plain_line(manager, batches=batches)), soft_wrap=True)
    with Live(panel(manager, batches=batches), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await anyio.sleep(_REDRAW_SECONDS)
            live.update(panel(manager, batches=batches), refresh=True)


def panel(manager: AsyncRolloutManager, *, batches: int) -> Panel:
    """The state of a run as a panel."""
    counts, numbers = manager.accounting, manager.run_metrics
    size = manager.config.batch_size
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    at = min(manager.batches + 1, batches)
    bar.add_row(
        f"batch {at}/{batches}", ProgressBar(total=size, completed=counts.ready), f"{counts.ready}/{size} groups"
    )
    groups = Text.assemble(
        f"{counts.in_flight} in flight · {counts.ready} ready · ",
        (f"{counts.in_batch + counts.ready} kept", "green"),
        " · ",
        (f"{counts.dropped} dropped", "yellow"),
        " · ",
        (f"{counts.failed} failed", "red" if counts.failed else ""),
    )
    rates = f"{numbers.tokens_per_second:.0f} tokens/s · mean reward {_number(numbers.mean_reward)}"
    waits = manager.waiting_for()
    body = Table.grid()
    body.add_row(bar)
    body.add_row(groups)
    body.add_row(rates)
    waiting = visible(f"waiting for {waits[0]}" if waits else "waiting for nothing")
    body.add_row(Text(waiting, "dim", no_wrap=True))
    return Panel(body, title="rollouts", subtitle=f"{time.monotonic() - numbers.started:.0f} s", expand=True)


def plain_line(manager: AsyncRolloutManager, *, batches: int) -> str:
    """The state of a run in one line."""
    counts, numbers = manager.accounting, manager.run_metrics
    waits = manager.waiting_for()
    return " · ".join(
        [
            f"{time.monotonic() - numbers.started:.0f} s",
            f"batch {min(manager.batches + 1, batches)}/{batches}: {counts.ready}/{manager.config.batch_size} groups",
            f"{counts.in_flight} in flight",
            f"{counts.in_batch + counts.ready} kept",
            f"{counts.dropped} dropped",
            f"{counts.failed} failed",
            f"{numbers.tokens_per_second:.0f} tokens/s",
            f"mean reward {_number(numbers.mean_reward)}",
            visible(f"oldest: {waits[0]}" if waits else "waiting for nothing"),
        ]
    )


def summary(result: RunResult, writer: RunWriter) -> Text:
    """The summary of a run: accounting of the prompts, metrics of each batch, files, next commands."""
    numbers = result.run_metrics
    colour = {"finished": "bold green", "stopped": "bold yellow"}.get(result.status, "bold red")
    text = Text()
    text.append(f"{result.status}", colour)
    text.append(f" after {result.seconds:.1f} s: {result.accounting}\n")
    earlier = result.batches - len(result.batch_metrics)
    if earlier > 0:
        text.append(visible(f"{earlier} earlier batches: {writer.path / 'metrics.jsonl'}\n"))
    for batch in result.batch_metrics:
        text.append(
            f"batch {batch.get('batch', 0):g}: mean reward {batch.get('reward/mean', 0):.3f} (std "
            f"{batch.get('reward/std', 0):.3f}), {batch.get('tokens/mean', 0):.0f} tokens a sample, "
            f"{batch.get('sampled_tokens/mean', 0):.0f} of them trained, {batch.get('turns/mean', 0):.1f} turns, "
            f"{batch.get('seconds', 0):.1f} s\n"
        )
        text.append(visible(_faulty_calls(batch)), "yellow")
        if batch.get("repeated_prompts"):
            text.append(f"  {batch['repeated_prompts']:g} groups repeat a prompt of this batch: ", "yellow")
            text.append("give more prompts, a smaller batch_size, or epochs=1\n", "yellow")
    rate = numbers.sampled_tokens / max(result.seconds, 1e-9)
    text.append(f"{numbers.rollouts} rollouts, {numbers.sampled_tokens} sampled tokens, {rate:.0f} tokens/s, ")
    text.append(f"mean reward of all {_number(numbers.mean_reward)}\n")
    for reason, count in numbers.reasons.most_common(3):
        text.append(f"not kept: {count} × {visible(reason)}\n")
    if result.unbatched:
        text.append(f"accepted but in no batch: {result.unbatched} of those returned, in ")
        text.append(visible(f"{writer.path / 'unbatched.jsonl'}\n"))
    text.append(visible(f"files: {writer.path}\n"))
    text.append(visible(f"next:  rollouts show {writer.path}\n       rollouts verify {writer.path}"))
    return text


def _faulty_calls(batch: Mapping[str, float]) -> str:
    """The tool calls that did not run, by error kind; an empty string if all ran."""
    malformed, unknown = "episode/malformed_tool_calls/", "episode/unknown_tool_calls"
    faults = {name.removeprefix(malformed): mean for name, mean in batch.items() if name.startswith(malformed)}
    faults |= {"unknown tool": batch[unknown]} if unknown in batch else {}
    kinds = ", ".join(f"{mean:.2g} {name}" for name, mean in sorted(faults.items(), key=lambda each: -each[1]) if mean)
    return f"  of {batch.get('episode/tool_calls', 0):.2g} tool calls a sample did not run: {kinds}\n" if kinds else ""


def groups_table(groups: Sequence[Sequence[Row]]) -> Table:
    """One row per group: index, outcome, prompt, rewards, their standard deviation, and lengths in tokens."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("group", justify="right")
    table.add_column("outcome")
    table.add_column("prompt", ratio=1, max_width=48, no_wrap=True, overflow="ellipsis")
    table.add_column("rewards", no_wrap=True, overflow="ellipsis")
    for name in ("std", "tokens", "trained"):
        table.add_column(name, justify="right")
    for rows in groups:
        samples = [row.sample() for row in rows]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        lengths = [len(sample) for sample in samples]
        trained = [int(sample.mask_column.sum()) for sample in samples]
        table.add_row(
            Text(visible(str(samples[0].group_index))),
            _outcome(rows[0]),
            Text(visible(_prompt_text(samples[0].prompt))),
            " ".join(f"{reward:g}" for reward in rewards),
            f"{statistics.pstdev(rewards):.2f}" if rewards else "",
            f"{min(lengths)}-{max(lengths)}",
            f"{min(trained)}-{max(trained)}",
        )
    return table


def samples_table(rows: Sequence[Row]) -> Table:
    """One row per sample of a group."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("sample", "reward", "status", "turns", "tokens", "trained", "logprob"):
        table.add_column(name, justify="left" if name == "status" else "right")
    for row in rows:
        sample = row.sample()
        mask, logprobs = sample.mask_column, sample.logprob_column
        mean = f"{logprobs[mask].mean():.3f}" if logprobs is not None and mask.any() else ""
        status = f"{sample.status.value} {sample.stop_reason.value if sample.stop_reason else ''}"
        counts = (len(sample.completions), len(sample), int(mask.sum()))
        table.add_row(Text(visible(str(sample.index))), _number(sample.reward), status, *map(str, counts), mean)
    return table


def _outcome(row: Row) -> Text:
    if row.outcome == "kept":
        return Text(visible(f"batch {row.data.get('batch')}"), "green")
    return Text(row.outcome, {"dropped": "yellow", "failed": "red"}.get(row.outcome, "cyan"))


def _prompt_text(prompt: object) -> str:
    if isinstance(prompt, str):
        return " ".join(prompt.split())
    texts = (
        [str(entry.get("content")) for entry in prompt if isinstance(entry, dict)] if isinstance(prompt, list) else []
    )
    return " ".join((texts[-1] if texts else "").split())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
