"""``rollouts work``: a worker for a service on another machine, until SIGTERM."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import Any

from rollouts.base.terminal import say
from rollouts.commands.arguments import above_0, add_verb, in_loop
from rollouts.commands.up import KEY
from rollouts.distributed.join import work

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "work", _work, "play rollouts for rollouts up", "work --join http://127.0.0.1:8700")
    parser.add_argument(
        "--join", required=True, metavar="URL", help=f"URL of rollouts up --remote-workers; its key is read from {KEY}"
    )
    parser.add_argument(
        "--patience",
        type=above_0,
        default=300.0,
        metavar="SECONDS",
        help="ask a service that does not answer for so long (default: 300)",
    )


def _work(args: argparse.Namespace) -> int:
    in_loop(
        functools.partial(
            work,
            args.join,
            key=os.environ.get(KEY),
            patience=args.patience,
            say=lambda text: say(f"worker: {text}", file=sys.stderr, flush=True),
        )
    )
    return 0
