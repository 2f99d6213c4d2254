"""An evaluation from a command line: played, written as it goes, gone on with, told, and held against another.

    rollouts.jsonl    one line a rollout, as it ends
    eval.json         what was asked, and what came of it

Invariant: a rollout that has ended is on disk and is never played again; whoever stops an evaluation and starts it anew
with the same recipe gets the rest. Rollouts of two different recipes, models or samplings never stand in one folder.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.commands.arguments import add_target, add_verb, in_loop, numbers, positive, target_of
from rollouts.commands.target import RunTarget, open_target
from rollouts.display.transcript import visible
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe, preflight
from rollouts.runs.folder import check_outside
from rollouts.runs.run import observe
from rollouts.training.evaluation import (
    TaskScore,
    compare,
    estimate_mean,
    estimate_pass_at_k,
    pass_at_k,
    run_evaluation,
    task_key,
    task_scores,
)
from rollouts.training.types import Group, Sample

__all__ = ["EvalOptions", "add", "compare_evaluations", "evaluate", "load_evaluation"]

_LINE_SECONDS = 5.0
_SAME = ("recipe", "environment", "generate", "tokenizer", "model", "sampling")
"""What two sittings of one evaluation must agree in."""


@attrs.frozen(kw_only=True)
class EvalOptions:
    """How an evaluation is done."""

    out: Path
    ks: tuple[int, ...] = (1,)
    rollouts: int = 8
    """Of each task; at least the largest k."""
    tasks: int | None = None
    """The first so many of the recipe's prompts; all where not given."""
    threshold: float = 1.0
    """A rollout passes if its reward reaches it."""
    shown: int = 40
    """Tasks in the table."""

    def __attrs_post_init__(self) -> None:
        if not self.ks or not all(1 <= k <= self.rollouts for k in self.ks):
            raise ConfigError.of("--k", self.ks, f"numbers from 1 to {self.rollouts}, the rollouts of each task")


async def evaluate(aim: RunTarget, exam: EvalOptions, console: Console) -> list[TaskScore]:
    """Play what is not there yet, and print the scores.

    Raises:
        ConfigError: the folder holds another evaluation or a run, or the recipe is wrong.
        EndpointError: the server does not answer.
        GenerateFailure: rollouts fail one after the other.
    """
    check_outside(exam.out, "--out")
    if (exam.out / "run.json").exists():  # a live run's engine writes its log there, too
        raise ConfigError.of("--out", str(exam.out), "a folder without a run in it; it holds run.json")
    exam.out.mkdir(parents=True, exist_ok=True)
    async with open_target(aim, exam.out / "engine.log") as (recipe, _):
        await preflight(recipe)
        prompts = recipe.data_buffer.prompts[: exam.tasks]
        asked = _asked(recipe)
        _check_same(exam.out, asked)
        _write(exam.out / "eval.json", {**asked, "rollouts": exam.rollouts, "threshold": exam.threshold})
        done = Counter({score.key: score.rollouts for score in task_scores(_stored(exam.out))})
        writer = _Writer(exam.out / "rollouts.jsonl", done.total(), exam.rollouts * len(prompts))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(observe, writer.watch, console)
            await run_evaluation(recipe.config, prompts, exam.rollouts, done=done, on_group=writer.add)
            tasks.cancel_scope.cancel()
    wanted = {task_key(prompt.prompt, prompt.label) for prompt in prompts}
    scores = [score for score in task_scores(_stored(exam.out), threshold=exam.threshold) if score.key in wanted]
    estimates = {f"pass@{k}": attrs.asdict(estimate_pass_at_k(scores, k)) for k in exam.ks}
    estimates["reward"] = attrs.asdict(estimate_mean(scores))
    summary = {**asked, "rollouts": exam.rollouts, "threshold": exam.threshold, "estimates": estimates}
    _write(exam.out / "eval.json", summary)
    console.print(_scores_table(scores, exam))
    console.print(_summary(scores, exam), soft_wrap=True, highlight=False)
    return scores


def load_evaluation(path: Path, *, threshold: float | None = None) -> list[TaskScore]:
    """The scores of a stored evaluation, under its own threshold where none is given.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    if threshold is None:
        threshold = float(_read(path).get("threshold", 1.0))
    return task_scores(_stored(path), threshold=threshold)


def compare_evaluations(before: Path, after: Path, ks: Sequence[int], console: Console) -> None:
    """Print how an evaluation differs from another, on the tasks that both have.

    Raises:
        ConfigError: one is not there, they share no task, or a task has too few rollouts for k.
    """
    first, second = load_evaluation(before), load_evaluation(after)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", str(before), str(after), "difference", "95 %", "tasks", "better", "worse"):
        table.add_column(Text(visible(name)), justify="right")
    shared = {score.key for score in first} & {score.key for score in second}
    ours, theirs = ([score for score in scores if score.key in shared] for scores in (first, second))
    for k in ks:
        found = compare(first, second, k)
        table.add_row(
            f"pass@{k}",
            f"{estimate_pass_at_k(ours, k).value:.3f}",
            f"{estimate_pass_at_k(theirs, k).value:.3f}",
            f"{found.difference:+.3f}",
            f"{found.low:+.3f} to {found.high:+.3f}",
            str(found.tasks),
            str(found.better),
            str(found.worse),
        )
    console.print(table)


# -- on disk -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Appends rollouts as they end; called from worker threads."""

    def __init__(self, path: Path, there: int, wanted: int) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._count, self._wanted = there, max(there, wanted)
        self._rewards: list[float] = []

    def add(self, group: Group) -> None:
        with self._lock, self._path.open("ab") as file:
            # Numbered as they stand here: a second sitting counts from 0 again.
            rows = [{**sample.to_dict(), "rollout_id": self._count} for sample in group.samples]
            file.write(b"".join(msgspec.json.encode(row, enc_hook=repr) + b"\n" for row in rows))
            self._count += 1
            self._rewards += [sample.reward or 0.0 for sample in group.samples]

    async def watch(self, console: Console) -> None:
        while True:
            await anyio.sleep(_LINE_SECONDS)
            mean = sum(self._rewards) / len(self._rewards) if self._rewards else 0.0
            console.print(f"{self._count}/{self._wanted} rollouts · mean reward {mean:.3f}", highlight=False)


def _stored(path: Path) -> Iterator[Sample]:
    """The rollouts on disk. A last line that was cut off by a crash is removed, and played again."""
    file = path / "rollouts.jsonl"
    if not file.exists():
        return
    text = file.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(file, whole)
    for number, line in enumerate(text[:whole].splitlines(), 1):
        try:
            yield Sample.from_dict(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.DecodeError, ConfigError, TypeError, ValueError) as error:
            raise ConfigError(f"{file}, line {number}: not a rollout ({error})") from None


def _asked(recipe: Recipe) -> dict[str, Any]:
    told = recipe.describe()
    endpoint = recipe.endpoint
    kept = {name: told[name] for name in ("recipe", "environment", "generate", "tokenizer")}
    return {**kept, "model": endpoint.model, "sampling": attrs.asdict(endpoint.sampling)}


def _check_same(path: Path, asked: dict[str, Any]) -> None:
    if not (path / "eval.json").exists():
        if (path / "rollouts.jsonl").exists():
            raise ConfigError.of("--out", str(path), "a folder without rollouts of something else")
        return
    old, new = _read(path), msgspec.json.decode(msgspec.json.encode(asked, enc_hook=repr))
    for name in _SAME:
        if old.get(name) != new.get(name):
            raise ConfigError.of(f"--out {path}: {name}", new.get(name), f"{old.get(name)}, as in its first part")


def _read(path: Path) -> dict[str, Any]:
    file = path / "eval.json"
    if not file.is_file():
        raise ConfigError.of("evaluation", str(path), "a folder that an evaluation was written to: it holds eval.json")
    try:
        value: dict[str, Any] = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: not an evaluation ({error})") from None
    return value


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(content, enc_hook=repr), indent=2) + b"\n")
    os.replace(temporary, path)


# -- shown -------------------------------------------------------------------------------------------------------------


def _scores_table(scores: Sequence[TaskScore], exam: EvalOptions) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("task", no_wrap=True)
    table.add_column("prompt", ratio=1, max_width=56, no_wrap=True, overflow="ellipsis")
    for name in ("passed", "failed", *(f"pass@{k}" for k in exam.ks), "reward"):
        table.add_column(name, justify="right")
    for score in sorted(scores, key=lambda score: score.passed / score.rollouts)[: exam.shown]:
        table.add_row(
            score.key,
            Text(" ".join(visible(score.text).split())),
            f"{score.passed}/{score.rollouts}",
            str(score.failed or ""),
            *(f"{pass_at_k(score.rollouts, score.passed, k):.2f}" for k in exam.ks),
            f"{score.mean_reward:.2f}",
        )
    return table


def _summary(scores: Sequence[TaskScore], exam: EvalOptions) -> Text:
    text = Text()
    left = len(scores) - exam.shown
    if left > 0:
        text.append(f"... and {left} tasks more, with higher scores\n", "dim")
    every = sum(score.rollouts for score in scores)
    failed = sum(score.failed for score in scores)
    text.append(f"{len(scores)} tasks, {every} rollouts" + (f", {failed} failed" if failed else "") + "\n")
    for k in exam.ks:
        text.append(f"pass@{k} {estimate_pass_at_k(scores, k)}\n", "bold")
    text.append(f"reward {estimate_mean(scores)}\n")
    text.append(visible(f"files: {exam.out}"))
    return text


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "eval", _eval, "score a recipe's tasks", "eval configs/calculator.py --k 1,8 --out runs/exam"
    )
    add_target(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="its folder; goes on with what is there")
    parser.add_argument("--k", type=numbers, default=(1,), metavar="K,K", help="pass@k for these k (1)")
    parser.add_argument("--rollouts", type=positive, metavar="N", help="of each task; the largest k by default")
    parser.add_argument("--tasks", type=positive, metavar="N", help="the first N prompts of the recipe; all by default")
    parser.add_argument("--threshold", type=float, default=1.0, help="a rollout passes if its reward reaches it (1)")
    parser.add_argument("--limit", type=positive, default=40, metavar="N", help="tasks in the table (40)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="an earlier evaluation to compare with")


def _eval(args: argparse.Namespace) -> int:
    exam = EvalOptions(
        out=args.out,
        ks=args.k,
        rollouts=max(args.k) if args.rollouts is None else args.rollouts,
        tasks=args.tasks,
        threshold=args.threshold,
        shown=args.limit,
    )
    in_loop(evaluate, target_of(args), exam, Console())
    if args.against is not None:
        compare_evaluations(args.against, args.out, args.k, Console())
    return 0
