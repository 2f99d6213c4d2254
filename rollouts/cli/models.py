"""The verbs about models: score one, compare two evaluations, check a chat template."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from rollouts.checking import Subject, check
from rollouts.cli.words import (
    BROKEN,
    add_aim,
    add_verb,
    aim_of,
    in_loop,
    numbers,
    options_of,
    positive,
)
from rollouts.evaluating import Exam, compare_evaluations, evaluate

__all__ = ["add_models"]


def add_models(verbs: Any) -> None:
    """Add them to the command line."""
    exam = add_verb(
        verbs, "eval", _eval, "score a recipe's tasks", "eval configs/calculator.py --k 1,8 --out runs/exam"
    )
    add_aim(exam)
    exam.add_argument("--out", type=Path, required=True, metavar="DIR", help="its folder; goes on with what is there")
    exam.add_argument("--k", type=numbers, default=(1,), metavar="K,K", help="pass@k for these k (1)")
    exam.add_argument("--rollouts", type=positive, metavar="N", help="of each task; the largest k by default")
    exam.add_argument("--tasks", type=positive, metavar="N", help="the first N prompts of the recipe; all by default")
    exam.add_argument("--threshold", type=float, default=1.0, help="a rollout passes if its reward reaches it (1)")
    exam.add_argument("--limit", type=positive, default=40, metavar="N", help="tasks in the table (40)")
    exam.add_argument("--against", type=Path, metavar="DIR", help="an earlier evaluation to compare with")

    versus = add_verb(verbs, "compare", _compare, "compare two evaluations", "compare runs/before runs/after --k 1,8")
    versus.add_argument("before", type=Path, metavar="BEFORE", help="the folder of an evaluation")
    versus.add_argument("after", type=Path, metavar="AFTER", help="another, of the same tasks")
    versus.add_argument("--k", type=numbers, default=(1,), metavar="K,K", help="pass@k for these k (1)")

    check = add_verb(
        verbs, "check", _check, "say whether every token of this model's chat template is exact", "check --model DIR"
    )
    check.add_argument("--model", metavar="NAME_OR_DIR", help="the tokenizer; by default what the endpoint names")
    check.add_argument("--template", type=Path, metavar="FILE", help="this chat template instead of the model's own")
    check.add_argument("--endpoint", metavar="URL", help="send ids to this server, and compare what it says it got")
    check.add_argument("--recipe", type=Path, metavar="FILE", help="take the tools from this recipe's environment")
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the recipe")
    check.add_argument("--dialect", metavar="NAME", help="how tool calls are written; by default what is taught")
    check.add_argument("--stop", type=int, action="append", default=[], metavar="ID", help="ids that end a turn")


def _eval(args: argparse.Namespace) -> int:
    exam = Exam(
        out=args.out,
        ks=args.k,
        rollouts=max(args.k) if args.rollouts is None else args.rollouts,
        tasks=args.tasks,
        threshold=args.threshold,
        shown=args.limit,
    )
    in_loop(evaluate, aim_of(args), exam, Console())
    if args.against is not None:
        compare_evaluations(args.against, args.out, args.k, Console())
    return 0


def _compare(args: argparse.Namespace) -> int:
    compare_evaluations(args.before, args.after, args.k, Console())
    return 0


def _check(args: argparse.Namespace) -> int:
    subject = Subject(
        model=args.model,
        template=args.template,
        endpoint=args.endpoint,
        recipe=args.recipe,
        options=options_of(args),
        dialect=args.dialect,
        stops=tuple(args.stop),
    )
    return 0 if in_loop(check, subject, Console()) else BROKEN
