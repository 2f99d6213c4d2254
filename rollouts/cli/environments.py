"""The verbs for authors of environments: begin one, and check one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from rollouts.cli.words import (
    BROKEN,
    add_verb,
    in_loop,
    options_of,
    positive,
)
from rollouts.environment_check import Candidate, check_environment
from rollouts.scaffolding import new_environment

__all__ = ["add_environments"]


def add_environments(verbs: Any) -> None:
    """Add them to the command line."""
    novel = add_verb(verbs, "new-env", _new_env, "begin an environment of your own, with its tests", "new-env wordle")
    novel.add_argument("name", metavar="NAME", help="of its folder: a Python name in lower case")
    novel.add_argument("--into", type=Path, default=Path(), metavar="DIR", help="where its folder is made (here)")

    paces = add_verb(
        verbs, "check-env", _check_env, "play an environment with random replies", "check-env configs/guess.py"
    )
    paces.add_argument("path", type=Path, metavar="PATH", help="a recipe, or a file with one environment class")
    paces.add_argument("--data", type=Path, metavar="PATH", help="the recipe's option data")
    paces.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any option of the recipe")
    paces.add_argument("--text", default="Begin.", metavar="PROMPT", help="the prompt for a file without a recipe")
    paces.add_argument("--prompts", type=positive, default=4, metavar="N", help="how many are played (4)")
    paces.add_argument("--seed", type=int, default=0, metavar="N", help="of the replies (0)")


def _new_env(args: argparse.Namespace) -> int:
    for path in new_environment(args.name, args.into):
        print(path)
    return 0


def _check_env(args: argparse.Namespace) -> int:
    options = options_of(args)
    if args.data is not None:
        options["data"] = str(args.data)
    candidate = Candidate(path=args.path, options=options, text=args.text, prompts=args.prompts, seed=args.seed)
    return 0 if in_loop(check_environment, candidate, Console()) else BROKEN
