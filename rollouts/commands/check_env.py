"""``rollouts check-env``: play an environment with random replies and report its faults."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.commands.arguments import (
    BROKEN,
    add_chat_options,
    add_options,
    add_verb,
    all_options_of,
    chat_of,
    in_loop,
    positive,
)
from rollouts.commands.chat_options import CHAT_PROVIDER
from rollouts.dtypes import Endpoint, Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import EnvironmentFactory
from rollouts.errors import ConfigError
from rollouts.recipe.files import build, import_file
from rollouts.testing.environment_check import CheckOptions, Finding, Verdict, examine
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.transcript import visible

__all__ = ["add", "load_environment", "show_findings"]

_STYLES: dict[Verdict, str] = {"good": "green", "bad": "bold red", "note": "yellow"}


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "check-env", _check_env, "does an environment work? It is played with random replies", "check-env guess"
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="recipe, or file with one environment class")
    add_options(parser, "--data", "--set")
    parser.add_argument(
        "--text", default="Begin.", metavar="PROMPT", help="prompt of a file without a recipe (default: Begin.)"
    )
    parser.add_argument("--tasks", type=positive, default=4, metavar="N", help="play the first N prompts (default: 4)")
    parser.add_argument("--reply-seed", type=int, default=0, metavar="N", help="seed of random replies (default: 0)")
    add_chat_options(parser, provider="openai: a model of a chat API plays these prompts, too")
    parser.add_argument("--model", metavar="NAME", help="with --provider openai: its model")


def _check_env(args: argparse.Namespace) -> int:
    args.endpoint = []
    chat = chat_of(args)
    if args.provider not in (None, CHAT_PROVIDER):
        raise ConfigError.of("--provider", args.provider, '"openai": the replies are random, or of a chat API')
    if args.model is not None and args.provider is None:
        raise ConfigError.of("--model", args.model, "none without --provider openai")
    environment_cls, prompts = load_environment(args.path, all_options_of(args), text=args.text, count=args.tasks)
    findings: list[Finding] = in_loop(examine, environment_cls, prompts, CheckOptions(seed=args.reply_seed))
    if args.provider == CHAT_PROVIDER:
        from rollouts.commands.chat_target import played_by_api  # here: it is asked for rarely

        findings += in_loop(played_by_api, environment_cls, prompts, chat, args.model)
    return 0 if show_findings(findings, SafeConsole()) else BROKEN


def load_environment(
    path: Path, options: Mapping[str, str], *, text: str = "Begin.", count: int = 4
) -> tuple[EnvironmentFactory, list[Prompt]]:
    """The environment of a file, with the prompts to play it with.

    Args:
        path: a recipe file, or a file with one environment class.
        options: of the recipe.
        text: the prompt for a file without a recipe.
        count: number of prompts: the first of the recipe, or copies of ``text``.

    Raises:
        ConfigError: the file contains no environment, or its recipe cannot be built.
    """
    module = import_file(path)
    function = getattr(module, "recipe", None)
    if callable(function):
        recipe = build(function, Endpoint(model=str(DEMO_MODEL)), options)
        return recipe.environment_for("check-env"), list(recipe.data_buffer.prompts[:count])
    classes: list[Any] = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and all(callable(getattr(value, name, None)) for name in ("start", "step", "close"))
    ]
    if len(classes) != 1:
        names = [cls.__name__ for cls in classes]
        raise ConfigError.of(str(path), names, "a function recipe(...), or one class with start, step, close")
    return classes[0], [Prompt(text)] * count


def show_findings(findings: list[Finding], console: Console) -> bool:
    """Print the findings; return whether none is bad."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        table.add_row(
            Text(visible(finding.about)), Text(finding.verdict, _STYLES[finding.verdict]), Text(visible(finding.text))
        )
    console.print(table)
    bad = sum(finding.verdict == "bad" for finding in findings)
    console.print(Text(f"{bad} bad" if bad else "all good", "bold red" if bad else "green"))
    return not bad
