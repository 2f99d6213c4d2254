"""Two ways to distil a trained model into its own start model: ``scripts/learn --distill``.

    python -m training.distill --out runs/distill                 # trains the teacher first
    python -m training.distill --teacher runs/learn/checkpoint --out runs/distill

    sft          TRL's SFTTrainer on curated rollouts of the teacher, as token rows
    on-policy    the student's own rollouts; a sampled token's advantage is the teacher's logprob minus the student's

Invariant: the students begin with the weights that the teacher began with, get no reward, and train on problems with
numbers below 60; they are evaluated on problems with numbers from 60 on. Needs ``rollouts[engine,parquet,trl]``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
from rich.table import Table

from rollouts.curation import Selection, curate, write_folder
from rollouts.views.terminal.console import SafeConsole
from training.grpo import GrpoConfig
from training.learn import HELD_OUT_KINDS, START_MODEL, Lesson, exit_code, learn
from training.sft import Job, run_verb, scores_of, train

__all__ = ["distill"]

_RECIPE = "calculator_grpo"


@attrs.frozen(kw_only=True)
class _Sizes:
    """Sizes of the trainings."""

    seed: int
    tasks: int
    teacher_steps: int
    steps: int
    rollouts: int


def distill(out: Path, teacher: Path | None, sizes: _Sizes, console: SafeConsole) -> list[dict[str, Any]]:
    """Train both students, and the teacher if there is none; returns a row for each model."""
    lesson = Lesson(
        recipe=Path(_RECIPE),
        out=out / "teacher",
        grpo=GrpoConfig(lr=5e-4, seed=sizes.seed),
        options={"seed": str(sizes.seed)},
        steps=sizes.teacher_steps,
        held_out=0,
    )
    if teacher is None:
        _learn(lesson, console)
        teacher = lesson.checkpoint
    rows = [_evaluated("start model", START_MODEL, out, sizes), _evaluated("teacher", teacher, out, sizes)]

    began = time.monotonic()
    size = ["--set", f"batch_size={sizes.rollouts}", "--set", "n_samples_per_prompt=1", "--seed", str(sizes.seed)]
    folder = out / "run"
    run_verb("run", _RECIPE, "--model", str(teacher), *size, "--out", str(folder), "--quiet", "--overwrite")
    write_folder(curate(folder, "tokens", Selection()), out / "rows", overwrite=True)
    trained = train(Job(data=out / "rows", model=START_MODEL, out=out / "sft", seed=sizes.seed))
    seconds = time.monotonic() - began
    rows.append({**_evaluated("sft", out / "sft", out, sizes), "rollouts": trained["rows"], "seconds": seconds})

    began = time.monotonic()
    options = {**lesson.options, "n_samples_per_prompt": "4"}
    student = attrs.evolve(lesson, out=out / "on-policy", teacher=teacher, steps=sizes.steps, options=options)
    result = _learn(student, console)
    seconds, played = time.monotonic() - began, result["accounting"]["in_batch"]
    rows.append({**_evaluated("on-policy", student.checkpoint, out, sizes), "rollouts": 4 * played, "seconds": seconds})
    (out / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
    return rows


def _learn(lesson: Lesson, console: SafeConsole) -> dict[str, Any]:
    lesson.out.mkdir(parents=True, exist_ok=True)
    return anyio.run(learn, lesson, console)


def _evaluated(name: str, model: Path, out: Path, sizes: _Sizes) -> dict[str, Any]:
    """The greedy and the sampled score of each kind."""
    found: dict[str, Any] = {"model": name}
    for kind in HELD_OUT_KINDS:
        folder = out / f"eval-{name.replace(' ', '-')}-{kind}"
        size = ["--tasks", str(sizes.tasks), "--rollouts", "1", "--seed", str(sizes.seed), "--set", f"kind={kind}"]
        run_verb("eval", _RECIPE, "--model", str(model), *size, "--limit", "1", "--overwrite", "--out", str(folder))
        found[kind] = scores_of(folder)
    return found


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    heads = [f"{kind}, {name}" for kind in HELD_OUT_KINDS for name in ("T=1", "greedy")]
    table = Table("model", "rollouts", "seconds", *heads)
    for row in rows:
        scores = [f"{row[kind][name]:.3f}" for kind in HELD_OUT_KINDS for name in ("sampled", "greedy")]
        played = "–" if "rollouts" not in row else str(row["rollouts"])
        table.add_row(row["model"], played, "–" if "seconds" not in row else f"{row['seconds']:.0f}", *scores)
    return table


def main(arguments: Sequence[str]) -> int:
    """Train the students and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.distill", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/distill"), help="folder of models and evaluations")
    parser.add_argument("--teacher", type=Path, metavar="DIR", help="a trained model (default: train one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=48, help="problems of each kind to evaluate with (default: 48)")
    parser.add_argument("--teacher-steps", type=int, default=25, help="of 16 x 8 rollouts (default: 25)")
    parser.add_argument("--steps", type=int, default=15, help="on-policy, of 16 x 4 rollouts (default: 15)")
    parser.add_argument("--rollouts", type=int, default=192, help="of the teacher, for SFT (default: 192)")
    args = parser.parse_args(arguments)
    names = ("seed", "tasks", "teacher_steps", "steps", "rollouts")
    console = SafeConsole()

    def train_students() -> None:
        sizes = _Sizes(**{name: getattr(args, name) for name in names})
        console.print(_table(distill(args.out, args.teacher, sizes, console)))

    return exit_code("training.distill", train_students)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    sys.exit(main(sys.argv[1:]))
