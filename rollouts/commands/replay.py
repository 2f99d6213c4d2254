"""``rollouts replay``: play a recorded run again without a server, and compare the samples."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from rollouts.base.terminal import say
from rollouts.commands.arguments import BROKEN, add_repeatable, add_verb, check_run, in_loop, options_of, tell
from rollouts.commands.stored_target import resumed_target, stored_recipe
from rollouts.commands.target import RunTarget
from rollouts.errors import ReplayDiverged
from rollouts.runs.replay import replay

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "replay", _replay, "replay a recorded run without a server, and compare", "replay runs/a")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run that was recorded with run --record")
    parser.add_argument("--recipe", type=Path, metavar="RECIPE", help="recipe to play (default: the run's)")
    add_repeatable(parser, "--set", "KEY=VALUE", "replace an option of the run's recipe")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the replayed samples as JSON Lines")
    parser.add_argument("--overwrite", action="store_true", help="replace the file at --out")


def _replay(args: argparse.Namespace) -> int:
    check_run(args.run)
    recipe = stored_recipe(resumed_target(RunTarget(recipe=args.recipe, options=options_of(args)), args.run), args.run)
    try:
        say(in_loop(functools.partial(replay, overwrite=args.overwrite), args.run, recipe, args.out))
    except ReplayDiverged as error:
        tell(error, debug=args.debug)
        return BROKEN
    return 0
