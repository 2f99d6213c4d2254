"""``rollouts compare``: compare two evaluations of the same tasks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rollouts.commands.arguments import add_verb, numbers
from rollouts.commands.evaluate import compare_evaluations
from rollouts.views.terminal.console import SafeConsole

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "compare", _compare, "compare two evaluations", "compare runs/before runs/after --k 1,8")
    parser.add_argument("before", type=Path, metavar="BEFORE", help="folder of the first evaluation")
    parser.add_argument("after", type=Path, metavar="AFTER", help="folder of another evaluation of the same tasks")
    parser.add_argument("--k", type=numbers, default=(1,), metavar="K,K", help="pass@k for these k (default: 1)")


def _compare(args: argparse.Namespace) -> int:
    compare_evaluations(args.before, args.after, args.k, SafeConsole())
    return 0
