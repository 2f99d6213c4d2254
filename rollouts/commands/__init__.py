"""The command ``rollouts``: runs, stored runs, evaluations, environments and servers.

Invariant: an expected error is one line on standard error and an exit code: 2 for bad input, 1 for a broken law or a
failed run, 130 for Ctrl-C. No child process outlives the command. The verbs only connect packages; the work is done in
the packages below.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rollouts import __version__
from rollouts.commands import (
    check_env,
    check_template,
    compare,
    evaluate,
    export,
    new_env,
    plan,
    play,
    replay,
    rescore,
    run,
    serve,
    serve_env,
    show,
    verify,
)
from rollouts.commands.arguments import BAD_INPUT, INTERRUPTED, tell
from rollouts.errors import RolloutsError
from rollouts.interrupts import handling_interrupts

__all__ = ["main"]

VERBS = (
    run, show, play, verify, export, replay, rescore, plan, evaluate, compare, check_template, new_env, check_env,
    serve, serve_env,
)  # fmt: skip
"""The modules of the verbs, in the order of ``rollouts --help``. Each has a function ``add``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        with handling_interrupts():
            code: int = args.verb(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed the pipe
        return 0
    except RolloutsError as error:
        tell(error, debug=args.debug)
        return BAD_INPUT
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollouts",
        description="Turn an inference endpoint and an environment into training data: exact tokens, whole groups.",
        epilog="Exit codes: 0 success, 1 a law is broken or the run failed, 2 bad input, 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"rollouts {__version__}")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for module in VERBS:
        module.add(verbs)
    return parser
