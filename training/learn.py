"""Training loop: generate over HTTP, take a GRPO step, load the new weights into the server, repeat.

    python -m training.learn calculator_grpo --out runs/learn

Invariant: the server samples with the weights that the trainer wrote under the server's version; versions count from 1,
and every sampled token stores its version. Held-out prompts are never trained on.

Held-out prompts are scored before and after, sampled as in training and greedy: the greedy score shows the most likely
behaviour, the sampled score also its certainty. ``--kinds`` adds prompts of kinds that are not trained on.

With ``--endpoint`` a running SGLang server generates, which must be able to read the folder of ``--out``: it loads the
model that training starts from, and then each version. Without it, the embedded engine does.

By default generation and training alternate, and every batch comes from the newest weights. With ``--async`` generation
continues while the trainer steps, and batches are up to ``--max-staleness`` versions old.

With ``--credit`` an estimator of ``rollouts.training.credit`` computes the advantages, by turn where it does; with
``--teacher`` they are the differences of another model's logprobs and the policy's, and rewards are only reported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import attrs
import msgspec
import torch
import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from rollouts.commands.arguments import add_provider, options_of
from rollouts.concurrency.boundary import function_name
from rollouts.dtypes import Endpoint, Prompt
from rollouts.engine.process import engine_process
from rollouts.errors import ConfigError, RolloutsError
from rollouts.inference.weights import update_weights
from rollouts.recipe import Recipe, preflight
from rollouts.recipe.files import build, load_recipe, read_options, recipe_options
from rollouts.rewards.teachers import Teacher, scored_by_teachers, teachers_as_advantages
from rollouts.training import AsyncRolloutManager, BufferState, Sample
from rollouts.training import credit as estimators
from rollouts.training.credit import Estimator, assign_advantages
from rollouts.training.evaluation import (
    TaskScore,
    estimate_mean,
    estimate_pass_at_k,
    run_evaluation,
    task_key,
    task_scores,
)
from rollouts.training.filters import check_reward_nonzero_std
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.transcript import visible
from training.board import WINDOW, Board, draw_curve
from training.grpo import GrpoConfig, GrpoTrainer

__all__ = [
    "HELD_OUT_KINDS",
    "START_MODEL",
    "Ablation",
    "HeldOutScores",
    "Lesson",
    "changes",
    "endpoint_of",
    "evaluate",
    "exit_code",
    "held_out_prompts",
    "learn",
    "lesson_of",
    "main_of_seats",
    "spend",
    "trainer_of",
]

START_MODEL = Path(__file__).parent / "start_model"
"""Folder of the model that training starts from: its most probable episode guesses without a tool, and is wrong."""
OWN_KIND = "as trained"
"""Name of the held-out prompts of the trained kind."""

CREDIT = ("grpo", "dr_grpo", "rloo", "maxrl", "returns_to_go")
"""The estimators of ``rollouts.training.credit`` that need nothing but rewards."""

Ablation = Literal["mask", "advantages"]
"""Deliberate errors in the data: ``mask`` trains every token, ``advantages`` shuffles the rewards."""

HELD_OUT_KINDS = ("one_step_60_99", "unseen_pairs_60_99")
"""Kinds of the calculator's problems with numbers from 60 on, which no training problem has."""


@attrs.frozen(kw_only=True)
class Lesson:
    """Configuration of a training run."""

    recipe: Path
    out: Path
    model: Path = START_MODEL
    options: dict[str, str] = attrs.field(factory=dict)
    """Options of the recipe, as text."""
    grpo: GrpoConfig = attrs.field(factory=GrpoConfig)
    steps: int = 40
    until: float | None = None
    """Stop when the greedy score of every kind in ``kinds`` is at least this, checked every ``check_every`` steps;
    without ``kinds`` the mean reward of ``WINDOW`` batches."""
    check_every: int = 2
    held_out: int = 96
    """Prompts of each kind that are not trained on; each gets ``held_out_rollouts`` rollouts and a greedy one, before
    and after."""
    held_out_rollouts: int = 3
    kinds: tuple[str, ...] = ()
    """Values of the recipe's option ``kind``; prompts of these kinds are held out, too."""
    asynchronous: bool = False
    max_staleness: int = 2
    policy: Literal["drop", "pace"] = "pace"
    ablation: Ablation | None = None
    credit: Estimator | None = None
    """Computes the advantages; ``None`` for those of the trainer, GRPO's."""
    teacher: Path | None = None
    """Folder of a model whose logprobs are the advantages: on-policy distillation."""
    save_every: int = 0
    """Steps between checkpoints; 0 for one at the end."""
    keep_weights: bool = False
    """Keep the weights of every version and the samples of every batch, so that they can be compared."""
    resume: bool = False
    endpoint: Endpoint | None = None
    """The servers that generate, by their URLs and keys; ``None`` starts the embedded engine."""
    slots: int = 64

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint"


async def learn(lesson: Lesson, console: Console) -> dict[str, Any]:
    """Train; returns the content of ``result.json``.

    Raises:
        RolloutsError: an invalid recipe, an unreachable server, or the end of the prompts.
    """
    entered = time.monotonic()
    source = lesson.checkpoint if lesson.resume else lesson.model
    async with contextlib.AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(endpoint_of(lesson, source))
        recipe = build(load_recipe(lesson.recipe), endpoint, lesson.options)
        if lesson.teacher is not None:
            engine = await stack.enter_async_context(
                engine_process(lesson.teacher, lesson.out / "teacher.log", slots=lesson.slots)
            )
            scored = scored_by_teachers([Teacher(f"{engine.url}/generate")], recipe.config.filter_fn)
            recipe = attrs.evolve(recipe, config=attrs.evolve(recipe.config, filter_fn=scored))
        server = await preflight(recipe)
        held_out = held_out_prompts(lesson, endpoint, recipe)
        trainer = await anyio.to_thread.run_sync(trainer_of, lesson, source)
        manager = await stack.enter_async_context(AsyncRolloutManager(recipe.config, recipe.data_buffer))
        manager.announce_version(server.weight_version or "default")
        board = stack.enter_context(Board(lesson.out / "steps.csv", console, steps=lesson.steps, resume=lesson.resume))
        if lesson.resume:
            _load_buffer(lesson, recipe)
        if recipe.lifetime is not None:
            await stack.enter_async_context(recipe.lifetime)
        before = await evaluate(lesson, recipe, held_out, board, "before")
        started = time.monotonic()
        async with contextlib.aclosing(_batches(lesson, manager)) as batches:
            step = trainer.batches
            began = time.monotonic()
            while step < lesson.steps:
                samples = await anext(batches)
                step += 1
                generated = time.monotonic()
                numbers = await anyio.to_thread.run_sync(spend, trainer, samples, lesson, step)
                trained = time.monotonic()
                await _publish(lesson, trainer, recipe.endpoint, manager, step, samples)
                now = time.monotonic()
                board.add(
                    step,
                    {
                        "elapsed": now - started,
                        "sampled_tokens": manager.run_metrics.sampled_tokens,
                        "started_groups": manager.accounting.taken,
                        **numbers,
                        "generation_seconds": generated - began,
                        "step_seconds": trained - generated,
                        "update_seconds": now - trained,
                        "tokens_per_second": sum(int(sample.mask_column.sum()) for sample in samples) / (now - began),
                        **{
                            name: value for name, value in manager.metrics.items() if name.startswith(("stale", "idle"))
                        },
                    },
                )
                began = now
                if lesson.save_every and step % lesson.save_every == 0:
                    await anyio.to_thread.run_sync(_save, lesson, trainer, recipe)
                if lesson.until is None:
                    continue
                if not lesson.kinds:
                    rewards = [row["reward"] for row in board.rows[-WINDOW:]]
                    if len(rewards) == WINDOW and statistics.fmean(rewards) >= lesson.until:
                        break
                elif step % lesson.check_every == 0:
                    lowest = await _lowest_greedy(lesson, recipe, held_out)
                    board.say(f"greedy {lowest:.3f} after {manager.run_metrics.sampled_tokens} sampled tokens")
                    if lowest >= lesson.until:
                        break
        learned = time.monotonic()
        after = await evaluate(lesson, recipe, held_out, board, "after")
        await anyio.to_thread.run_sync(_save, lesson, trainer, recipe)
        ended = time.monotonic()
        result: dict[str, Any] = {
            "before": {kind: scores.describe() for kind, scores in before.items()},
            "after": {kind: scores.describe() for kind, scores in after.items()},
            "steps": step,
            "sampled_tokens": manager.run_metrics.sampled_tokens,
            "seconds": {"total": ended - entered, "learning": learned - started},
            "accounting": attrs.asdict(manager.accounting),
            "lesson": {
                "recipe": recipe.describe(),
                "grpo": attrs.asdict(lesson.grpo),
                "asynchronous": lesson.asynchronous,
                "max_staleness": lesson.max_staleness if lesson.asynchronous else 0,
                "policy": lesson.policy,
                "ablation": lesson.ablation,
                "credit": None if lesson.credit is None else function_name(lesson.credit),
                "teacher": None if lesson.teacher is None else str(lesson.teacher),
            },
        }
    (lesson.out / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    first, last = (scores.get(OWN_KIND) for scores in (before, after))
    picture = draw_curve(
        lesson.out / "steps.csv", lesson.out / "curve.png",
        before=first.sampled if first else (), after=last.sampled if last else (),
    )  # fmt: skip
    if before:
        console.print(changes(before, after))
    files = ", ".join(str(path) for path in (picture, lesson.checkpoint) if path is not None)
    said = f"{result['steps']} steps in {result['seconds']['total']:.0f} s; {files}"
    console.print(Text(visible(said)), soft_wrap=True)
    return result


@contextlib.asynccontextmanager
async def endpoint_of(lesson: Lesson, source: Path) -> AsyncIterator[Endpoint]:
    """The server, with the weights of ``source``."""
    if lesson.endpoint is None:
        async with engine_process(source, lesson.out / "engine.log", slots=lesson.slots) as engine:
            yield Endpoint(model=str(source), base_url=engine.url)
        return
    # Another training run may have left its weights on the server.
    await update_weights(lesson.endpoint, source, f"start-{time.time_ns():x}")
    yield attrs.evolve(lesson.endpoint, model=str(source))


def held_out_prompts(lesson: Lesson, endpoint: Endpoint, recipe: Recipe) -> dict[str, list[Prompt]]:
    """Prompts to evaluate on, by kind; those of the recipe's own kind are removed from its data.

    Raises:
        ConfigError: the recipe has no option ``kind``, or trains on a prompt of a held-out kind.
    """
    if not lesson.held_out:
        return {}
    held_out = {OWN_KIND: recipe.data_buffer.hold_out(lesson.held_out)}
    function = load_recipe(lesson.recipe)
    if lesson.kinds and "kind" not in {option.name for option in recipe_options(function)}:
        raise ConfigError.of("--kinds", lesson.kinds, f"a recipe with an option kind; {lesson.recipe} has none")
    trained = {task_key(prompt.prompt, None) for prompt in recipe.data_buffer.prompts}
    for kind in lesson.kinds:
        other = build(function, endpoint, {**lesson.options, "kind": kind})
        prompts = held_out[kind] = other.data_buffer.hold_out(lesson.held_out)
        if any(task_key(prompt.prompt, None) in trained for prompt in prompts):
            raise ConfigError.of("--kinds", kind, "a kind of prompts that are not trained on")
    return held_out


async def _batches(lesson: Lesson, manager: AsyncRolloutManager) -> AsyncGenerator[list[Sample], None]:
    if lesson.asynchronous:
        stream = manager.stream(max_staleness=lesson.max_staleness, policy=lesson.policy)
        async with contextlib.aclosing(stream) as batches:
            async for samples in batches:
                yield samples
        raise ConfigError.of("recipe", manager.data_buffer, "prompts for every step; the data are exhausted")
    while True:
        yield await manager.generate_batch()


def trainer_of(lesson: Lesson, source: Path) -> GrpoTrainer:
    """The trainer, with the weights of ``source``."""
    torch.set_num_threads(1)  # on two cores a second thread slows the engine more than it speeds this up
    torch.manual_seed(lesson.grpo.seed)
    disable_progress_bar()

    def load(path: Path) -> Any:
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True
        )
        return model.to("cuda" if torch.cuda.is_available() else "cpu")

    trainer = GrpoTrainer(load(source), lesson.grpo, reference=load(lesson.model) if lesson.grpo.kl_coef else None)
    if lesson.resume:
        trainer.load(lesson.checkpoint)
    return trainer


def spend(trainer: GrpoTrainer, samples: Sequence[Sample], lesson: Lesson, step: int) -> dict[str, float]:
    """Train on one batch, without the groups whose advantages are all 0."""
    numbers = {"reward": sum(sample.reward or 0.0 for sample in samples) / len(samples), "tools": _tool_share(samples)}
    if lesson.ablation is not None:
        samples = _broken(samples, lesson.ablation, random.Random(f"{lesson.grpo.seed}/{step}"))
    groups: dict[int | None, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    kept = [group for group in groups.values() if lesson.teacher is not None or check_reward_nonzero_std(group)]
    numbers |= {"groups": len(groups), "kept_groups": len(kept)}
    for group in kept:
        if lesson.teacher is not None:
            teachers_as_advantages(group, [0.0] * len(group))
        elif lesson.credit is not None:
            assign_advantages(group, lesson.credit)
    if kept:
        numbers |= trainer.step([sample for group in kept for sample in group])
    else:
        trainer.batches += 1
    return numbers


def _broken(samples: Sequence[Sample], ablation: Ablation, rng: random.Random) -> list[Sample]:
    """Copies of the samples with one law broken."""
    copies = [Sample.from_dict(sample.to_dict(), sample.named_images.__getitem__) for sample in samples]
    if ablation == "advantages":
        rewards = [sample.reward for sample in samples]
        rng.shuffle(rewards)
        for copy, reward in zip(copies, rewards, strict=True):
            copy.reward = reward
        return copies
    for copy in copies:
        copy.versions = []
        copy.loss_mask = [0] + [1] * (len(copy) - 1)
    return copies


async def _publish(
    lesson: Lesson, trainer: GrpoTrainer, endpoint: Endpoint, manager: AsyncRolloutManager, step: int, samples: Any
) -> None:
    """Write the weights as a new version, and load them into the server."""
    version = str(step)
    folder = lesson.out / "weights" / version
    await anyio.to_thread.run_sync(trainer.model.save_pretrained, folder)
    await update_weights(endpoint, folder, version)
    manager.announce_version(version)
    if lesson.keep_weights:
        lines = b"".join(msgspec.json.encode(sample.to_dict()) + b"\n" for sample in samples)
        await anyio.Path(folder / "batch.jsonl").write_bytes(lines)
    else:
        shutil.rmtree(folder)


@attrs.frozen
class HeldOutScores:
    """The scores of one kind of held-out prompts."""

    sampled: list[TaskScore]
    greedy: list[TaskScore]
    tools_sampled: float
    """Share of the sampled episodes that call a tool."""
    tools_greedy: float
    calls: float
    """Tool calls of a sampled episode, on average."""

    def describe(self) -> dict[str, Any]:
        estimates = {"sampled": estimate_mean(self.sampled), "greedy": estimate_mean(self.greedy)}
        rollouts = self.sampled[0].rollouts
        estimates |= {f"pass@{k}": estimate_pass_at_k(self.sampled, k) for k in sorted({1, rollouts})}
        texts = {name: {**attrs.asdict(value), "text": str(value)} for name, value in estimates.items()}
        return {**texts, "tools_sampled": self.tools_sampled, "tools_greedy": self.tools_greedy, "calls": self.calls}


async def evaluate(
    lesson: Lesson, recipe: Recipe, held_out: Mapping[str, Sequence[Prompt]], board: Board, when: str
) -> dict[str, HeldOutScores]:
    found = {}
    for kind, prompts in held_out.items():
        sampled = await run_evaluation(recipe.config, prompts, lesson.held_out_rollouts)
        greedy = await run_evaluation(recipe.with_sampling(temperature=0.0).config, prompts, 1)
        found[kind] = scores = HeldOutScores(
            sampled=task_scores(sampled),
            greedy=task_scores(greedy),
            tools_sampled=_tool_share(sampled),
            tools_greedy=_tool_share(greedy),
            calls=sum(map(_calls, sampled)) / len(sampled),
        )
        board.say(
            f"held out, {when}, {kind}: sampled {estimate_mean(scores.sampled)} · greedy"
            f" {estimate_mean(scores.greedy)} · episodes that call a tool {scores.tools_sampled:.2f}"
            f" and {scores.tools_greedy:.2f}"
        )
    return found


async def _lowest_greedy(lesson: Lesson, recipe: Recipe, held_out: Mapping[str, Sequence[Prompt]]) -> float:
    """The lowest mean greedy reward of the kinds that are not trained on."""
    config = recipe.with_sampling(temperature=0.0).config
    scores = [task_scores(await run_evaluation(config, held_out[kind], 1)) for kind in lesson.kinds]
    return min(estimate_mean(each).value for each in scores)


def _calls(sample: Sample) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in sample.messages)


def _tool_share(samples: Sequence[Sample]) -> float:
    return sum(_calls(sample) > 0 for sample in samples) / len(samples)


def changes(before: Mapping[str, HeldOutScores], after: Mapping[str, HeldOutScores]) -> Table:
    """A row for each kind of held-out prompts, before and after."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("held out", "sampled", "greedy", "call a tool", "greedy, too"):
        table.add_column(head, justify="left" if head == "held out" else "right")
    for kind, first in before.items():
        last = after[kind]
        pairs = (
            (estimate_mean(first.sampled).value, estimate_mean(last.sampled).value, "{:.3f}"),
            (estimate_mean(first.greedy).value, estimate_mean(last.greedy).value, "{:.3f}"),
            (first.tools_sampled, last.tools_sampled, "{:.2f}"),
            (first.tools_greedy, last.tools_greedy, "{:.2f}"),
        )
        cells = (f"{form.format(old)} -> {form.format(new)}" for old, new, form in pairs)
        table.add_row(Text(visible(kind)), *cells)
    return table


def _save(lesson: Lesson, trainer: GrpoTrainer, recipe: Recipe) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(lesson.model, local_files_only=True)
    trainer.save(lesson.checkpoint, tokenizer=tokenizer)
    state = recipe.data_buffer.save_state().to_dict()
    (lesson.checkpoint / "data_buffer.json").write_bytes(msgspec.json.encode(state))


def _load_buffer(lesson: Lesson, recipe: Recipe) -> None:
    state = msgspec.json.decode((lesson.checkpoint / "data_buffer.json").read_bytes())
    recipe.data_buffer.load_state(BufferState.from_dict(state))


def lesson_of(arguments: Sequence[str] | None = None) -> Lesson:
    """The configuration that a command line asks for; by default that of this process."""
    parser = argparse.ArgumentParser(prog="training.learn", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "recipe",
        type=Path,
        nargs="?",
        default=Path("calculator_grpo"),
        help="a built-in recipe, or a recipe file (calculator_grpo); calculator_program trains on the same problems"
        " through a program, a process for each rollout",
    )
    add("--out", type=Path, required=True, help="folder for curve, CSV, checkpoint and logs; they are replaced")
    add("--model", type=Path, default=START_MODEL, help="folder of the model to start from (training/start_model)")
    add(
        "--endpoint",
        action="append",
        default=[],
        metavar="URL",
        help="a running SGLang or vLLM server that can read --out and --model; repeat it for several. The keys are"
        " read from ROLLOUTS_API_KEY and ROLLOUTS_ADMIN_KEY (default: the embedded engine)",
    )
    add_provider(parser)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the recipe")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=40)
    add(
        "--until",
        type=float,
        metavar="SCORE",
        help=f"stop at this greedy score of every kind of --kinds; without, at this mean reward of {WINDOW} batches",
    )
    add("--check-every", type=int, default=2, metavar="STEPS", help="steps between two checks of --until")
    add("--held-out", type=int, default=96, help="prompts of each kind to score before and after, never trained on")
    add(
        "--kinds",
        type=_names,
        default=(),
        metavar="KIND,KIND",
        help="hold out prompts of these kinds of the recipe, too",
    )
    add("--lr", type=float, default=GrpoConfig().lr)
    add("--minibatches", type=int, default=GrpoConfig().minibatches)
    add("--kl-coef", type=float, default=0.0)
    add("--layout", choices=("padded", "packed"), default="padded")
    add("--no-tis", action="store_true", help="no importance weight between trainer and rollout logprobs")
    add("--async", dest="asynchronous", action="store_true", help="generate while the trainer steps")
    add("--max-staleness", type=int, default=2)
    add("--policy", choices=("drop", "pace"), default="pace", help="what keeps batches within --max-staleness")
    add("--credit", choices=CREDIT, help="the estimator of the advantages (default: grpo, as the trainer has it)")
    add("--discount", type=float, default=1.0, help="of --credit returns_to_go (default: 1)")
    add("--teacher", type=Path, metavar="DIR", help="learn the distribution of this model, on the policy's rollouts")
    add("--ablate", choices=("mask", "advantages"), help="train on deliberately wrong masks or rewards")
    add("--save-every", type=int, default=0, metavar="STEPS")
    add("--keep-weights", action="store_true")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    return _lesson(parser.parse_args(arguments))


def main() -> int:
    """The command line."""

    def train() -> None:
        lesson = lesson_of()
        read_options(load_recipe(lesson.recipe), lesson.options)
        _make_room(lesson)
        anyio.run(learn, lesson, Console())

    return exit_code("learn", train)


def exit_code(program: str, train: Callable[[], object], *others: type[Exception]) -> int:
    """Train; an error of the package, or of these further types, is one line on stderr, and the exit code 2."""
    expected: tuple[type[Exception], ...] = (RolloutsError, *others)
    try:
        train()
    except expected as error:
        with contextlib.suppress(OSError):
            print(visible(f"{program}: error: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def main_of_seats(
    file: str,
    summary: str | None,
    train: Callable[[Lesson, SafeConsole], Awaitable[object]],
    arguments: Sequence[str],
    *,
    steps: int,
    rollouts: str,
) -> int:
    """Train a recipe of several seats and print the scores before and after; returns the exit code.

    Args:
        file: the module with the recipe.
        summary: the module's docstring.
        train: trains the lesson.
        arguments: of the command line.
        steps: the default number of steps.
        rollouts: the size of a step.
    """
    name = Path(file).stem
    first = (summary or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m training.{name}", description=first)
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help="folder of the training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help=f"of {rollouts} rollouts (default: {steps})")
    parser.add_argument("--held-out", type=int, default=48, help="problems of each kind to score (default: 48)")
    args = parser.parse_args(arguments)
    lesson = Lesson(
        recipe=Path(file),
        out=args.out,
        options={"seed": str(args.seed)},
        grpo=GrpoConfig(lr=5e-4, seed=args.seed),
        steps=args.steps,
        held_out=args.held_out,
        kinds=HELD_OUT_KINDS,
    )
    lesson.out.mkdir(parents=True, exist_ok=True)
    return exit_code(f"training.{name}", lambda: anyio.run(train, lesson, SafeConsole()))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _lesson(args: argparse.Namespace) -> Lesson:
    if args.until is not None and args.kinds and not args.held_out:
        raise ConfigError.of(
            "--until", args.until, "--held-out prompts of --kinds, whose greedy scores it is compared with"
        )
    if args.check_every < 1:
        raise ConfigError.of("--check-every", args.check_every, "an integer >= 1")
    if args.discount != 1 and args.credit != "returns_to_go":
        raise ConfigError.of("--discount", args.discount, "1 without --credit returns_to_go")
    if args.teacher is not None and (args.credit or args.ablate):
        raise ConfigError.of(
            "--teacher", str(args.teacher), "neither --credit nor --ablate: its logprobs are the credit"
        )
    credit: Estimator | None = None if args.credit is None else getattr(estimators, args.credit)
    if args.discount != 1:
        credit = functools.partial(estimators.returns_to_go, discount=args.discount)
    tis = None if args.no_tis or args.ablate == "mask" else GrpoConfig().tis_clip
    grpo = GrpoConfig(
        lr=args.lr,
        minibatches=args.minibatches,
        kl_coef=args.kl_coef,
        layout=args.layout,
        tis_clip=tis,
        seed=args.seed,
    )
    ahead = (
        {"over_sampling_factor": "2"} if args.asynchronous else {}
    )  # one batch is generated while another is trained on
    options = {"seed": str(args.seed), **ahead, **options_of(args)}
    endpoint = (
        Endpoint(
            provider=args.provider or "sglang",
            base_url=tuple(args.endpoint),
            api_key=os.environ.get("ROLLOUTS_API_KEY"),
            admin_key=os.environ.get("ROLLOUTS_ADMIN_KEY"),
        )
        if args.endpoint
        else None
    )
    return Lesson(
        endpoint=endpoint,
        recipe=args.recipe,
        out=args.out,
        model=args.model,
        options=options,
        grpo=grpo,
        steps=args.steps,
        until=args.until,
        check_every=args.check_every,
        held_out=args.held_out,
        kinds=args.kinds,
        asynchronous=args.asynchronous,
        max_staleness=args.max_staleness,
        policy=args.policy,
        ablation=args.ablate,
        credit=credit,
        teacher=args.teacher,
        save_every=args.save_every,
        keep_weights=args.keep_weights,
        resume=args.resume,
    )


def _make_room(lesson: Lesson) -> None:
    """Remove the files of an earlier training run from the folder, and no others."""
    if lesson.resume and not (lesson.checkpoint / "trainer.pt").is_file():
        raise ConfigError.of("--resume", str(lesson.checkpoint), "a checkpoint of an earlier training run")
    if not lesson.resume:
        for name in ("steps.csv", "result.json", "curve.png", "checkpoint", "weights"):
            path = lesson.out / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    lesson.out.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
