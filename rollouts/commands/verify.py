"""``rollouts verify``: check laws 1 to 5 on a stored run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rollouts.commands.arguments import BROKEN, add_verb, check_run
from rollouts.runs.verify import verify_run
from rollouts.terminal import say

_VIOLATIONS_SHOWN = 20

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "verify", _verify, "check that a stored run is intact: laws 1 to 5", "verify runs/a")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")


def _verify(args: argparse.Namespace) -> int:
    check_run(args.run)
    report = verify_run(args.run)
    say(report)
    for violation in report.violations[:_VIOLATIONS_SHOWN]:
        say(violation, file=sys.stderr)
    left = len(report.violations) - _VIOLATIONS_SHOWN
    if left > 0:
        say(f"... and {left} more", file=sys.stderr)
    return 0 if report.ok else BROKEN
