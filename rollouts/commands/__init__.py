"""The command ``rollouts``: runs, stored runs, evaluations, environments and servers.

Invariant: an expected error is one line on standard error and an exit code: 2 for bad input, 1 for a broken law or a
failed run, 130 for Ctrl-C. No child process outlives the command. The verbs only connect packages; the work is done in
the packages below. Only the module of the verb that is called is imported, so that ``rollouts --help`` starts at once.

Packages add verbs by entry points in the group ``rollouts.commands``: a function ``add(verbs)`` as each module here has
it, which adds a parser of its name with the default ``verb``. Built-in names cannot be replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from rollouts import __version__
from rollouts.base.terminal import guard_standard_error, visible
from rollouts.concurrency.interrupts import INTERRUPTED, handling_interrupts
from rollouts.errors import RolloutsError

__all__ = ["VERBS", "Verb", "main"]

ENTRY_POINTS = "rollouts.commands"
"""The group in which packages add verbs."""


class Verb(NamedTuple):
    """One verb of the command line."""

    module: str
    """The module of this package with its function ``add``."""
    does: str
    """Its line in ``rollouts --help``."""


VERBS = {
    "run": Verb("run", "generate batches and write them to a folder"),
    "recipes": Verb("recipes", "list the recipes with their options"),
    "ls": Verb("ls", "list the runs and evaluations in a folder"),
    "show": Verb("show", "print a stored run: groups, samples, transcripts"),
    "play": Verb("play", "play one prompt and print its turns"),
    "view": Verb("view", "write a run as an HTML page, or serve an active run"),
    "verify": Verb("verify", "check the laws on a stored run; with --model also its logprobs"),
    "export": Verb("export", "convert a stored run to a file format"),
    "replay": Verb("replay", "replay a recorded run without a server, and compare"),
    "rescore": Verb("rescore", "apply another reward function and filter to a stored run"),
    "plan": Verb("plan", "predict the best over-sampling factor and concurrency"),
    "eval": Verb("evaluate", "score a recipe's tasks: pass@k"),
    "compare": Verb("compare", "compare two evaluations"),
    "check": Verb("check_template", "test whether a model's chat template renders exact tokens"),
    "new-env": Verb("new_env", "create a template of an environment, with tests"),
    "check-env": Verb("check_env", "test an environment with random replies"),
    "check-task": Verb("check_task", "run the tests of tasks without a solution and with the reference"),
    "serve": Verb("serve", "start the embedded engine as a server"),
    "serve-env": Verb("serve_env", "serve a recipe's environment (Open Reward Standard)"),
    "gateway": Verb("gateway", "serve the model APIs to a program, and keep its tokens"),
    "conformance": Verb("conformance", "ask a server point by point for what a run relies on"),
    "doctor": Verb("doctor", "print versions, extras and the verbs that lack one"),
}
"""The verbs, in the order of ``rollouts --help``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    guard_standard_error()
    arguments = sys.argv[1:] if arguments is None else arguments
    args = argparse.Namespace(debug=False)
    try:
        _parser(arguments).parse_args(arguments, args)
        with handling_interrupts():
            code: int = args.verb(args)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = 0  # the reader closed the pipe
    except RolloutsError as error:
        from rollouts.commands.arguments import BAD_INPUT, tell  # here: help needs neither

        tell(error, debug=args.debug)
        code = BAD_INPUT
    except OSError as error:  # a full or closed output, among others
        from rollouts.commands.arguments import BROKEN, tell

        tell(RolloutsError(str(error)), debug=args.debug)
        code = BROKEN
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):  # the interpreter would flush it again, and print a traceback
        with contextlib.suppress(OSError, ValueError):
            output = sys.stdout.fileno()
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return code


class _Parser(argparse.ArgumentParser):
    """A parser without abbreviations of options, whose errors quote arguments without control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        super().error(visible(message))


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rollouts",
        description="Turn an inference endpoint and an environment into training data: exact tokens, whole groups.",
        epilog="Exit codes: 0 success, 1 a law is broken or the run failed, 2 bad input, 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"rollouts {__version__}")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    called = next((text for text in arguments if not text.startswith("-")), None)
    for name, verb in VERBS.items():
        if name == called:
            importlib.import_module(f"rollouts.commands.{verb.module}").add(verbs)
        else:
            verbs.add_parser(name, help=verb.does)
    if called not in VERBS:
        _add_plugins(verbs, called)
    return parser


def _add_plugins(verbs: Any, called: str | None) -> None:
    """Add the verbs of packages; only the called one is imported."""
    from rollouts.base.plugins import plugins  # here: a built-in verb does not read the entry points

    for name, plugin in plugins(ENTRY_POINTS).items():
        if name in VERBS:
            continue
        if name != called:
            verbs.add_parser(name, help=f"of {visible(plugin.distribution)}")
            continue
        add = plugin.load()
        try:
            add(verbs)
        except Exception as error:  # foreign code raises any type
            raise plugin.refused(f"add(verbs) raised {type(error).__name__}: {error}") from error
        if name not in verbs.choices or not callable(verbs.choices[name].get_default("verb")):
            raise plugin.refused("expected a function add(verbs) that adds a parser of this name with the default verb")
