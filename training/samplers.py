"""Two samplers on the same problems, to the same score: ``scripts/learn --samplers``.

    python -m training.samplers --out runs/samplers

Three of five problems have a wrong label, so that no rollout of them is ever right. Groups whose rewards are all equal
are discarded (``keep=spread``). Each sampler trains the start model until its greedy score on both held-out kinds is at
least ``--until``; those kinds have no wrong labels. A row has the tokens that were sampled until then, discarded groups
included; the checks are not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
from rich.table import Table

from rollouts.views.terminal.console import SafeConsole
from training.grpo import GrpoConfig
from training.learn import HELD_OUT_KINDS, Lesson, exit_code, learn

__all__ = ["compare_samplers"]

_SAMPLERS = ("uniform", "pass_rate")


def compare_samplers(lesson: Lesson, seeds: Sequence[int], console: SafeConsole) -> list[dict[str, Any]]:
    """Train once for each seed and sampler, in folders of ``lesson.out``; returns the rows of ``result.json``."""
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for sampler in _SAMPLERS:
            options = {**lesson.options, "seed": str(seed), "sampler": sampler}
            out = lesson.out / f"{sampler}-{seed}"
            one = attrs.evolve(lesson, out=out, options=options, grpo=attrs.evolve(lesson.grpo, seed=seed))
            out.mkdir(parents=True, exist_ok=True)
            result = anyio.run(learn, one, console)
            rows.append(
                {
                    "seed": seed,
                    "sampler": sampler,
                    "steps": result["steps"],
                    "sampled_tokens": result["sampled_tokens"],
                    "started_groups": result["accounting"]["taken"],
                    "greedy": min(result["after"][kind]["greedy"]["value"] for kind in lesson.kinds),
                    "seconds": result["seconds"]["learning"],
                }
            )
            text = msgspec.json.format(msgspec.json.encode(rows), indent=2)
            (lesson.out / "result.json").write_bytes(text + b"\n")
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each training; the ratio is to the tokens of the first sampler with the same seed."""
    table = Table("seed", "sampler", "steps", "groups started", "sampled tokens", "ratio", "greedy", "s")
    firsts = {row["seed"]: row["sampled_tokens"] for row in rows if row["sampler"] == _SAMPLERS[0]}
    for row in rows:
        tokens = row["sampled_tokens"]
        cells = [row["seed"], row["sampler"], row["steps"], row["started_groups"], f"{tokens:,}"]
        cells += [f"{tokens / firsts[row['seed']]:.2f}", f"{row['greedy']:.3f}", f"{row['seconds']:.0f}"]
        table.add_row(*map(str, cells))
    return table


def main(arguments: Sequence[str]) -> int:
    """Train and print the table; returns the exit code."""
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m training.samplers", description=first)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/samplers"), help="folder of the trainings")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    add("--until", type=float, default=0.9, help="lowest greedy score of the held-out kinds (default: 0.9)")
    add("--steps", type=int, default=24, help="at most, of 16 x 4 kept rollouts (default: 24)")
    add("--problems", type=int, default=192, help="to train on (default: 192)")
    add("--held-out", type=int, default=48, help="problems of each kind to score (default: 48)")
    add("--lr", type=float, default=2e-4)
    args = parser.parse_args(arguments)
    lesson = Lesson(
        recipe=Path("calculator_grpo"),
        out=args.out,
        options={
            "kind": "mislabelled",
            "keep": "spread",
            "n_samples_per_prompt": "4",
            "prompts": str(args.problems + args.held_out),
        },
        grpo=GrpoConfig(lr=args.lr),
        steps=args.steps,
        until=args.until,
        check_every=1,
        held_out=args.held_out,
        held_out_rollouts=1,
        kinds=HELD_OUT_KINDS,
    )
    console = SafeConsole()

    def compare() -> None:
        console.print(_table(compare_samplers(lesson, args.seeds, console)))

    return exit_code("training.samplers", compare)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    sys.exit(main(sys.argv[1:]))
