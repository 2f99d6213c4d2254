"""``rollouts rescore``: apply another reward function and filter to a stored run."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from rollouts.base.terminal import say
from rollouts.commands.arguments import add_options, add_verb, check_run, in_loop, options_of
from rollouts.commands.stored_target import stored_recipe
from rollouts.commands.target import RunTarget
from rollouts.runs.rescore import rescore
from rollouts.runs.writer import check_free

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "rescore",
        _rescore,
        "apply another reward function and filter to a stored run",
        "rescore runs/a --recipe calculator --out runs/b",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the stored run")
    parser.add_argument(
        "--recipe", type=Path, required=True, metavar="RECIPE", help="recipe with the reward, filter, batch size"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the new run")
    add_options(parser, "--set")
    parser.add_argument("--overwrite", action="store_true", help="delete the run that is in --out")
    parser.add_argument(
        "--format", default="auto", choices=("jsonl", "parquet", "auto"), help="format of batches (default: auto)"
    )


def _rescore(args: argparse.Namespace) -> int:
    check_run(args.run)
    check_free(args.out, overwrite=args.overwrite)
    recipe = stored_recipe(RunTarget(recipe=args.recipe, options=options_of(args)), args.run)
    say(in_loop(functools.partial(rescore, format=args.format, overwrite=args.overwrite), args.run, recipe, args.out))
    say(f"files: {args.out}")
    return 0
