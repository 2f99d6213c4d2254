"""``rollouts eval``: score a recipe's tasks, resume a stored evaluation, and compare two of them.

    rollouts.jsonl    one line per finished rollout
    greedy.jsonl      the same for the greedy rollout of each task
    eval.json         settings and estimates

Invariant: a finished rollout is on disk and is never played again; ``--resume`` with the same
recipe plays the rest. A folder never mixes rollouts of different recipes, models or sampling parameters, and those of
another reward function, environment or options only with ``--allow-changes``.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.base.storable import to_json
from rollouts.base.validators import is_number
from rollouts.commands.arguments import add_target, add_verb, in_loop, numbers, positive, target_of
from rollouts.commands.chat_options import CHAT_PROVIDER
from rollouts.commands.target import RunTarget, make_folder, open_target
from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import SamplingParams
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe, preflight
from rollouts.runs.images import ImageFolder
from rollouts.runs.layout import check_outside
from rollouts.runs.locks import take_lock
from rollouts.runs.reading import reading
from rollouts.runs.run import observe
from rollouts.runs.settings import changes, settings_of
from rollouts.runs.tools import ToolFolder, with_named_tools
from rollouts.runs.writer import append
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
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.transcript import visible

__all__ = ["EvalOptions", "add", "compare_evaluations", "evaluate", "load_evaluation", "scores_table"]

_LINE_SECONDS = 5.0
_SAME = ("recipe", "environment", "generate", "tokenizer", "model", "api", "sampling")
"""The settings that must not change when an evaluation is resumed."""
_COMPARED = ("reward", "environment", "generate", "options")
"""Groups of :func:`~rollouts.runs.settings.settings_of` that change only with ``--allow-changes``."""
_NOT_PLAYED = frozenset(
    (
        "batch_size",
        "n_samples_per_prompt",
        "over_sampling_factor",
        "keep",
        "sampler",
        "sampler_runs",
        "epochs",
        "batches",
    )
)
"""Options of every recipe that an evaluation does not use."""
_FILES = ("eval.json", "rollouts.jsonl", "greedy.jsonl")


@attrs.frozen(kw_only=True)
class EvalOptions:
    """The settings of an evaluation."""

    out: Path
    ks: tuple[int, ...] = (1,)
    rollouts: int = 8
    """Rollouts of each task; at least the largest k."""
    tasks: int | None = None
    """Evaluate the first ``tasks`` prompts of the recipe; ``None`` for all."""
    threshold: float = 1.0
    """A rollout passes if its reward is at least this."""
    greedy: bool = True
    """Also play one rollout of each task at temperature 0, unless the recipe's temperature is 0."""
    max_rows: int = 40
    """Rows of the table."""
    resume: bool = False
    """Continue the evaluation in ``out``."""
    overwrite: bool = False
    """Replace the evaluation in ``out``."""
    allow_changes: bool = False
    """Continue it with another reward function, environment or options, whose rollouts are then mixed."""

    def __attrs_post_init__(self) -> None:
        if not is_number(self.threshold):
            raise ConfigError.of("--threshold", self.threshold, "a finite number")
        if not self.ks or not all(1 <= k <= self.rollouts for k in self.ks):
            raise ConfigError.of("--k", self.ks, f"numbers from 1 to {self.rollouts}, the rollouts of each task")


async def evaluate(target: RunTarget, options: EvalOptions, console: Console) -> list[TaskScore]:
    """Play the rollouts that are missing on disk, and print the scores.

    Raises:
        ConfigError: the folder contains another evaluation or a run, another process writes to it, or the recipe is
            wrong.
        EndpointError: the server does not answer.
        GenerateFailure: too many rollouts fail in a row.
    """
    _check_folder(options)
    make_folder(options.out)
    lock = take_lock(options.out / ".lock")
    if lock is None:
        option = "--resume" if options.resume else "--out"
        raise ConfigError.of(option, str(options.out), "an evaluation that no other process is writing to")
    try:
        return await _evaluated(target, options, console)
    finally:
        os.close(lock)


async def _evaluated(target: RunTarget, options: EvalOptions, console: Console) -> list[TaskScore]:
    async with open_target(target, options.out / "engine.log") as (recipe, _):
        await preflight(recipe)
        prompts = recipe.data_buffer.prompts[: options.tasks]
        settings = _settings(recipe, target.options)
        if options.resume:
            _check_same(options.out, settings, allow_changes=options.allow_changes)
        for name in _FILES if options.overwrite else ():
            (options.out / name).unlink(missing_ok=True)
        _write(options.out / "eval.json", {**settings, "rollouts": options.rollouts, "threshold": options.threshold})
        games = {"rollouts.jsonl": (recipe, options.rollouts)}
        if options.greedy and _temperature_of(recipe) != 0:
            try:
                if "temperature" in _fields_of(recipe):
                    raise ConfigError("--body sets the temperature of each request")
                games["greedy.jsonl"] = (recipe.with_sampling(temperature=0.0), 1)
            except ConfigError as error:  # the recipe's own generate function samples as it likes
                console.print(Text(visible(f"no greedy rollouts: {error}")), soft_wrap=True)
        for name, (player, rollouts) in games.items():
            stored = list(_stored(options.out / name, cut=True))
            done = Counter({score.key: score.rollouts for score in task_scores(stored)})
            first = 1 + max((sample.index for sample in stored if sample.index is not None), default=-1)
            writer = _Writer(options.out / name, done.total(), rollouts * len(prompts))
            async with first_error() as tasks:
                tasks.start_soon(observe, writer.watch, console)
                await run_evaluation(
                    player.config, prompts, rollouts, done=done, first_index=first, on_group=writer.add
                )
                tasks.cancel_scope.cancel()
    wanted = {task_key(prompt.prompt, prompt.label) for prompt in prompts}
    scores, greedy = (
        [
            score
            for score in task_scores(_stored(options.out / name), threshold=options.threshold)
            if score.key in wanted
        ]
        for name in ("rollouts.jsonl", "greedy.jsonl")
    )
    estimates = {f"pass@{k}": attrs.asdict(estimate_pass_at_k(scores, k)) for k in options.ks}
    estimates["reward"] = attrs.asdict(estimate_mean(scores))
    if greedy:
        estimates["greedy pass@1"] = attrs.asdict(estimate_pass_at_k(greedy, 1))
        estimates["greedy reward"] = attrs.asdict(estimate_mean(greedy))
    summary = {**settings, "rollouts": options.rollouts, "threshold": options.threshold, "estimates": estimates}
    _write(options.out / "eval.json", summary)
    console.print(scores_table(scores, options))
    console.print(_counts(scores, options), soft_wrap=True, highlight=False)
    console.print(_estimates_table(scores, greedy, options.ks, _temperature_of(recipe)))
    if target.provider == CHAT_PROVIDER:
        from rollouts.commands.chat_target import cost_of  # here: most evaluations are on a server of tokens

        console.print(Text(visible(cost_of(recipe))), soft_wrap=True, highlight=False)
    console.print(Text(visible(f"files: {options.out}")), soft_wrap=True)
    return scores


def load_evaluation(path: Path, *, threshold: float | None = None) -> list[TaskScore]:
    """Load the scores of a stored evaluation; ``threshold`` replaces the stored one.

    Raises:
        ConfigError: the folder contains no evaluation, or it is damaged.
    """
    if threshold is None:
        threshold = float(_read(path).get("threshold", 1.0))
    return task_scores(_stored(path / "rollouts.jsonl"), threshold=threshold)


def compare_evaluations(before: Path, after: Path, ks: Sequence[int], console: Console) -> None:
    """Print the differences of pass@k on the tasks that both evaluations contain.

    Raises:
        ConfigError: an evaluation is missing, they share no task, or a task has too few rollouts for k.
    """
    first, second = load_evaluation(before), load_evaluation(after)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", str(before), str(after), "difference", "95 %", "tasks", "better", "worse"):
        table.add_column(Text(visible(name)), justify="right")
    shared = {score.key for score in first} & {score.key for score in second}
    ours, theirs = ([score for score in scores if score.key in shared] for scores in (first, second))
    for k in ks:
        comparison = compare(first, second, k)
        table.add_row(
            f"pass@{k}",
            f"{estimate_pass_at_k(ours, k).value:.3f}",
            f"{estimate_pass_at_k(theirs, k).value:.3f}",
            f"{comparison.difference:+.3f}",
            f"{comparison.low:+.3f} to {comparison.high:+.3f}",
            str(comparison.tasks),
            str(comparison.better),
            str(comparison.worse),
        )
    console.print(table)


# -- on disk -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Appends finished rollouts to a file. Thread-safe: worker threads call it."""

    def __init__(self, path: Path, done: int, wanted: int) -> None:
        self._path = path
        self._images, self._tools = ImageFolder(path.parent), ToolFolder(path.parent)
        self._lock = threading.Lock()
        self._count, self._wanted = done, max(done, wanted)
        self._rewards: list[float] = []

    def add(self, group: Group) -> None:
        with self._lock:
            # Numbered by position in the file: in earlier versions, the ids of a resumed evaluation began at 0 again.
            for sample in group.samples:
                self._images.write(sample.named_images)
                self._tools.write(sample.tools)
            rows = [{**with_named_tools(sample.to_dict()), "rollout_id": self._count} for sample in group.samples]
            append(self._path, [to_json(row) + b"\n" for row in rows])
            self._count += 1
            self._rewards += [sample.reward or 0.0 for sample in group.samples]

    async def watch(self, console: Console) -> None:
        while True:
            await anyio.sleep(_LINE_SECONDS)
            mean = sum(self._rewards) / len(self._rewards) if self._rewards else 0.0
            console.print(f"{self._count}/{self._wanted} rollouts · mean reward {mean:.3f}", highlight=False)


def _stored(file: Path, *, cut: bool = False) -> Iterator[Sample]:
    """The rollouts on disk, without a last line that is not whole, whose rollout is played again.

    Only the process that writes the file may ``cut`` such a line off it.
    """
    if not file.exists():
        return
    text = file.read_bytes()
    whole = text.rfind(b"\n") + 1
    if cut and whole < len(text):
        os.truncate(file, whole)
    for number, line in enumerate(text[:whole].splitlines(), 1):
        try:
            fields = ToolFolder(file.parent).restored(msgspec.json.decode(line, type=dict[str, Any]))
            yield Sample.from_dict(fields, ImageFolder(file.parent).load)
        except (msgspec.DecodeError, ConfigError, TypeError, ValueError) as error:
            raise ConfigError(f"{file}, line {number}: not a rollout ({error})") from None


def _settings(recipe: Recipe, options: Mapping[str, str]) -> dict[str, Any]:
    description = recipe.describe()
    endpoint = recipe.endpoint
    names = {name: description[name] for name in ("recipe", "environment", "generate", "tokenizer")}
    # The model of a chat API is known by its name alone, and another API may have another model of this name.
    of_endpoint = description["endpoint"]
    api = {"api": of_endpoint["base_url"]} if of_endpoint["provider"] == CHAT_PROVIDER else {}
    played = {name: value for name, value in options.items() if name not in _NOT_PLAYED}
    every = settings_of(recipe, None, played, {}, {})
    compared = {name: every[name] for name in _COMPARED}
    sampling = attrs.asdict(endpoint.sampling)
    return {**names, "model": endpoint.model, **api, "sampling": sampling, "settings": compared}


def _check_folder(options: EvalOptions) -> None:
    """Check that the folder has no run, and an evaluation if and only if that is resumed or replaced."""
    option, path = "--resume" if options.resume else "--out", options.out
    check_outside(path, option)
    if (path / "run.json").exists():  # a live run's engine writes its log there, too
        raise ConfigError.of(option, str(path), "a folder without a run in it; it holds run.json")
    if options.resume:
        if not (path / "eval.json").is_file():
            raise ConfigError.of(option, str(path), "the folder of an evaluation: it holds eval.json")
    elif (present := [name for name in _FILES if (path / name).exists()]) and not options.overwrite:
        expected = f"a folder without an evaluation in it; it has {', '.join(present)}. "
        expected += "--resume continues it, --overwrite replaces it"
        raise ConfigError.of(option, str(path), expected)


def _check_same(path: Path, settings: dict[str, Any], *, allow_changes: bool) -> None:
    old, new = _read(path), msgspec.json.decode(msgspec.json.encode(settings, enc_hook=repr))
    if isinstance(old.get("sampling"), dict):  # an older folder lacks the newer parameters
        old["sampling"] = {**attrs.asdict(SamplingParams()), **old["sampling"]}
    for name in _SAME:
        if old.get(name) != new.get(name):
            raise ConfigError.of(f"--resume {path}: {name}", new.get(name), f"{old.get(name)}, as in its first part")
    with reading(path / "eval.json"):
        changed = changes(old.get("settings", {}), new["settings"])  # folders of an earlier version have none
    if changed and not allow_changes:
        listed = " · ".join(map(str, changed))
        raise ConfigError(f"--resume {path}: {listed}, as in its first part; --allow-changes accepts other scores")


def _read(path: Path) -> dict[str, Any]:
    file = path / "eval.json"
    if not file.is_file():
        raise ConfigError.of("evaluation", str(path), "the folder of an evaluation: it holds eval.json")
    try:
        value: dict[str, Any] = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: not an evaluation ({error})") from None
    return value


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(content, enc_hook=repr), indent=2) + b"\n")
    os.replace(temporary, path)


# -- display -----------------------------------------------------------------------------------------------------------


def scores_table(scores: Sequence[TaskScore], options: EvalOptions) -> Table:
    """One row per task, the lowest scores first."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("task", no_wrap=True)
    table.add_column("prompt", max_width=56)  # the column that becomes narrower
    for name in ("passed", "failed", *(f"pass@{k}" for k in options.ks), "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for score in sorted(scores, key=lambda score: score.passed / score.rollouts)[: options.max_rows]:
        table.add_row(
            score.key,
            Text(" ".join(visible(score.text).split()), no_wrap=True, overflow="ellipsis"),
            f"{score.passed}/{score.rollouts}",
            str(score.failed or ""),
            *(f"{pass_at_k(score.rollouts, score.passed, k):.2f}" for k in options.ks),
            f"{score.mean_reward:.2f}",
        )
    return table


def _counts(scores: Sequence[TaskScore], options: EvalOptions) -> Text:
    text = Text()
    left = len(scores) - options.max_rows
    if left > 0:
        text.append(f"... and {left} more tasks, with higher scores\n", "dim")
    every = sum(score.rollouts for score in scores)
    failed = sum(score.failed for score in scores)
    text.append(f"{len(scores)} tasks, {every} rollouts" + (f", {failed} failed" if failed else ""))
    return text


def _fields_of(recipe: Recipe) -> Mapping[str, Any]:
    """The further fields of requests to a chat API, which replace sampling parameters."""
    body = recipe.bound.get("body")
    return body if isinstance(body, Mapping) else {}


def _temperature_of(recipe: Recipe) -> Any:
    """The temperature of the requests; not a number where that is left to a chat API."""
    return _fields_of(recipe).get("temperature", recipe.endpoint.sampling.temperature)


def _estimates_table(
    scores: Sequence[TaskScore], greedy: Sequence[TaskScore], ks: Sequence[int], temperature: Any
) -> Table:
    """The estimates, sampled and greedy side by side; a greedy rollout is one a task, so it has no pass@2."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    sampled = f"temperature {temperature:g}" if is_number(temperature) else "temperature of the API"
    for name in ("", sampled, *(["greedy"] if greedy else [])):
        table.add_column(name)
    for k in ks:
        other = [str(estimate_pass_at_k(greedy, 1)) if k == 1 else ""] if greedy else []
        table.add_row(f"pass@{k}", str(estimate_pass_at_k(scores, k)), *other, style="bold")
    table.add_row("reward", str(estimate_mean(scores)), *([str(estimate_mean(greedy))] if greedy else []))
    return table


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "eval", _eval, "score a recipe's tasks: pass@k", "eval calculator --k 1,8 --out runs/exam")
    add_target(parser)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="folder for a new evaluation")
    where.add_argument("--resume", type=Path, metavar="DIR", help="folder of an evaluation to resume")
    parser.add_argument("--overwrite", action="store_true", help="delete the evaluation that is in --out")
    parser.add_argument(
        "--allow-changes", action="store_true", help="resume with another reward, environment or options"
    )
    parser.add_argument("--k", type=numbers, default=(1,), metavar="K,K", help="pass@k for these k (default: 1)")
    parser.add_argument("--rollouts", type=positive, metavar="N", help="rollouts of each task (default: the largest k)")
    parser.add_argument("--tasks", type=positive, metavar="N", help="play only the first N prompts (default: all)")
    parser.add_argument("--threshold", type=float, default=1.0, help="lowest reward that passes (default: 1)")
    parser.add_argument("--no-greedy", action="store_true", help="no rollout of each task at temperature 0")
    parser.add_argument("--limit", type=positive, default=40, metavar="N", help="tasks in the table (default: 40)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="folder of an earlier evaluation to compare with")


def _eval(args: argparse.Namespace) -> int:
    resume = args.resume is not None
    out = args.resume if resume else args.out
    if args.overwrite and resume:
        raise ConfigError.of("--overwrite", True, "--out DIR with it")
    if args.allow_changes and not resume:
        raise ConfigError.of("--allow-changes", True, "--resume DIR with it")
    options = EvalOptions(
        out=out,
        resume=resume,
        overwrite=args.overwrite,
        allow_changes=args.allow_changes,
        ks=args.k,
        rollouts=max(args.k) if args.rollouts is None else args.rollouts,
        tasks=args.tasks,
        threshold=args.threshold,
        greedy=not args.no_greedy,
        max_rows=args.limit,
    )
    in_loop(evaluate, target_of(args), options, SafeConsole())
    if args.against is not None:
        compare_evaluations(args.against, out, args.k, SafeConsole())
    return 0
