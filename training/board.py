"""The display of a training run: a line or a live table of steps, a CSV of all numbers, and the curve as a picture.

    python -m training.board "as it is=runs/s0,runs/s1" "rewards shuffled=runs/shuffled" --out docs/learning.png

Invariant: it only writes the numbers that it gets; a column that a step does not have is empty in its row.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollouts.training.evaluation import TaskScore, estimate_mean

__all__ = ["WINDOW", "Board", "draw_curve", "draw_lessons", "read_steps"]

COLUMNS = {
    "reward": ("reward", "{:.3f}"),
    "tools": ("call a tool", "{:.2f}"),
    "kept_groups": ("kept", "{:.0f}"),
    "entropy": ("entropy", "{:.3f}"),
    "ratio": ("ratio", "{:.3f}"),
    "logprob_diff": ("|Δlogprob|", "{:.1e}"),
    "grad_norm": ("grad", "{:.2f}"),
    "staleness/mean": ("stale", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:.0f}"),
    "elapsed": ("s", "{:.0f}"),
}
"""Columns of the display: name of the number, head, format."""

_ROWS = 12
WINDOW = 5
"""Batches of a moving mean."""
_BARS = " ▁▂▃▄▅▆▇█"


class Board:
    """Collects the numbers of steps while the context lasts.

    Args:
        path: the CSV; rewritten with every step, so that it can be read meanwhile.
        console: a live table on a terminal, a line a step elsewhere.
        steps: total number of steps.
        resume: keep the rows that the CSV has.
    """

    def __init__(self, path: Path, console: Console, *, steps: int, resume: bool = False) -> None:
        self.path = path
        self.steps = steps
        self.rows: list[dict[str, float]] = read_steps(path) if resume and path.exists() else []
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of one step."""
        self.rows.append({"step": step, **numbers})
        self._write()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        parts = [f"{head} {form.format(numbers[name])}" for name, (head, form) in COLUMNS.items() if name in numbers]
        self.say(f"step {step}/{self.steps}: " + " · ".join(parts))

    def _write(self) -> None:
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def _table(self) -> Group:
        table = Table(box=None, header_style="bold")
        table.add_column("step", justify="right")
        for head, _ in COLUMNS.values():
            table.add_column(head, justify="right")
        for row in self.rows[-_ROWS:]:
            cells = [form.format(row[name]) if name in row else "" for name, (_, form) in COLUMNS.items()]
            table.add_row(f"{row['step']:.0f}/{self.steps}", *cells)
        rewards = [min(max(row["reward"], 0.0), 1.0) for row in self.rows][-72:]
        return Group(table, Text("reward " + "".join(_BARS[round(8 * reward)] for reward in rewards), "green"))


def read_steps(path: Path) -> list[dict[str, float]]:
    """The rows of a CSV that a board wrote."""
    with path.open(newline="") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def draw_curve(
    steps: Path, picture: Path, *, before: Sequence[TaskScore] = (), after: Sequence[TaskScore] = ()
) -> Path | None:
    """Draw reward against steps; ``None`` where matplotlib (the extra ``learn``) is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    rows = read_steps(steps)
    if not rows:
        return None
    at = [row["step"] for row in rows]
    rewards = [row["reward"] for row in rows]
    smooth = _smoothed(rewards)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(at, rewards, color="#9bbcd8", linewidth=1, label="mean reward of the batch")
    axes.plot(at, smooth, color="#1f5f99", linewidth=2, label=f"mean of {WINDOW} batches")
    for scores, place, name in ((before, at[0] - 1, "before"), (after, at[-1], "after")):
        if scores:
            estimate = estimate_mean(scores)
            error = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
            axes.errorbar(
                [place], [estimate.value], error, fmt="o", color="#c2571a", capsize=4,
                label=f"held out, {name}: {estimate.value:.3f}",
            )  # fmt: skip
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02), title=f"{rows[-1]['elapsed']:.0f} s")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(picture, dpi=120)
    return picture


def draw_lessons(lessons: Mapping[str, Sequence[Path]], picture: Path) -> None:
    """Draw several training runs: for each name the CSVs of its seeds, as means of five batches, in one colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for colour, (name, paths) in zip(("#1f5f99", "#c2571a", "#7a7a7a", "#3c8d40"), lessons.items(), strict=False):
        for number, path in enumerate(paths):
            rows = read_steps(path)
            curve = _smoothed([row["reward"] for row in rows])
            axes.plot([row["step"] for row in rows], curve, color=colour, label=None if number else name)
    axes.set(xlabel="step of 16 prompts x 8 rollouts", ylabel="mean reward, 5 batches", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Draw the training runs that the command line names."""
    parser = argparse.ArgumentParser(prog="training.board", description="Draw the curves of several training runs.")
    parser.add_argument("lessons", nargs="+", metavar="NAME=DIR,DIR", help="a name, and the folders of its seeds")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write")
    args = parser.parse_args()
    named = (lesson.partition("=") for lesson in args.lessons)
    draw_lessons({name: [Path(each) / "steps.csv" for each in paths.split(",")] for name, _, paths in named}, args.out)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Means over the last five values, or fewer at the start."""
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    main()
