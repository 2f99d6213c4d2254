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
from pathlib import Path
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
    "check-run": Verb("verify", "do the laws hold on a stored run? With --model: its logprobs"),
    "audit": Verb("audit", "do the laws hold on a dump of another system?"),
    "curate": Verb("curate", "make a data set for SFT or preference training of stored runs"),
    "export": Verb("export", "convert a stored run to a file format"),
    "replay": Verb("replay", "replay a recorded run without a server, and compare"),
    "rescore": Verb("rescore", "apply another reward function and filter to a stored run"),
    "plan": Verb("plan", "predict the best over-sampling factor and concurrency"),
    "eval": Verb("evaluate", "score a recipe's tasks: pass@k"),
    "compare": Verb("compare", "compare two evaluations"),
    "check-model": Verb("check_template", "does a model's chat template render exact tokens?"),
    "new-env": Verb("new_env", "create a template of an environment, with tests"),
    "check-env": Verb("check_env", "does an environment work? It is played with random replies"),
    "check-task": Verb("check_task", "do the tests of a recipe's tasks tell a solution from none?"),
    "serve": Verb("serve", "start the embedded engine as a server"),
    "up": Verb("up", "serve a recipe's groups to a trainer, which leases them"),
    "work": Verb("work", "play rollouts for rollouts up"),
    "serve-env": Verb("serve_env", "serve a recipe's environment (Open Reward Standard)"),
    "gateway": Verb("gateway", "serve the model APIs to a program, and keep its tokens"),
    "check-server": Verb("conformance", "does a server have what a run relies on, point by point?"),
    "doctor": Verb("doctor", "what is installed here, and which verbs lack a package?"),
}
"""The verbs. ``GROUPS`` has their order in ``rollouts --help``."""

GROUPS = {
    "Run": ("run", "eval", "plan"),
    "See": ("ls", "show", "view", "compare", "export", "curate", "replay", "rescore"),
    "Judge": ("check-env", "check-task", "check-model", "check-server", "check-run", "audit", "doctor"),
    "Environments": ("recipes", "new-env", "play"),
    "Serve": ("up", "work", "serve", "serve-env", "gateway"),
}
"""The verbs by what they are for; a verb in no group, such as that of another package, comes last."""

EARLIER = {"check": "check-model", "conformance": "check-server", "verify": "check-run"}
"""Earlier names of verbs, which work as before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    guard_standard_error()
    arguments = sys.argv[1:] if arguments is None else arguments
    args = argparse.Namespace(debug=False)
    try:
        arguments = _with_present_name(arguments)
        parser = _parser(arguments)
        if not arguments:
            parser.print_help()
            return 2
        parser.parse_args(arguments, args)
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


def _path(text: str) -> Path:
    """Parse a path: an empty one, as of an unset variable, is not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("got ''; expected a path, such as . for the current folder")
    return Path(text)


class _Parser(argparse.ArgumentParser):
    """A parser without abbreviations of options, whose errors quote arguments without control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        more = "" if "--help" in message else f"; see {self.prog} --help"
        self.exit(2, f"{self.prog}: error: {visible(message)}{more}\n")


class _MainParser(_Parser):
    """The parser of the command: its help lists the verbs in groups, its errors name the nearest verb or option."""

    verbs: argparse._SubParsersAction[Any]
    called: str | None = None

    def format_help(self) -> str:
        """The verbs in groups, each with its line."""
        does = {action.dest: action.help or "" for action in self.verbs._choices_actions}
        grouped = {title: [name for name in names if name in does] for title, names in GROUPS.items()}
        rest = does.keys() - {name for names in grouped.values() for name in names}
        grouped |= {"Others": [name for name in does if name in rest]} if rest else {}
        width = max(map(len, does))
        lines = [
            line
            for title, names in grouped.items()
            for line in (f"{title}:", *(f"  {name:<{width}}  {does[name]}".rstrip() for name in names), "")
        ]
        head, end = self._get_formatter(), self._get_formatter()
        head.add_usage(self.usage, (), ())
        head.add_text(self.description)
        end.add_text(self.epilog)
        return "\n".join([head.format_help(), *lines, end.format_help()])

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, with the nearest names for unknown ones."""
        from rollouts.base.nearest import did_you_mean  # here: only an error needs it

        if self.called is not None and self.called not in self.verbs.choices:
            near = did_you_mean(self.called, self.verbs.choices)
            super().error(f"VERB: got {self.called!r}; expected a verb of rollouts --help{near}")
        verb = self.verbs.choices.get(self.called or "")
        unknown, _, words = message.partition("unrecognized arguments: ")
        if verb is not None and not unknown:
            from rollouts.commands.unknown_arguments import hints  # here: only an error needs it

            message += hints(words.split(), list(verb._option_string_actions))
        super().error(message)


def _with_present_name(arguments: Sequence[str]) -> list[str]:
    """The arguments with the present name of a verb in the place of an earlier one."""
    place = next((number for number, text in enumerate(arguments) if not text.startswith("-")), None)
    return [EARLIER.get(text, text) if number == place else text for number, text in enumerate(arguments)]


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _MainParser(
        prog="rollouts",
        description="Turn an inference endpoint and an environment into training data: exact tokens, whole groups.",
        usage="rollouts [-h] [--version] [--debug] VERB ...",
        epilog="rollouts VERB --help describes a verb; --debug prints the traceback of an error. "
        "Exit codes: 0 success, 1 a law is broken or the run failed, 2 bad input, 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"rollouts {__version__}")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    verbs = parser.verbs = parser.add_subparsers(required=True, metavar="VERB", prog="rollouts", parser_class=_Parser)
    called = parser.called = next((text for text in arguments if not text.startswith("-")), None)
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
