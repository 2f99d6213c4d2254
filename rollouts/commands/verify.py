"""``rollouts check-run``: check laws 1 to 5 on a stored run, and law 8 with the weights of versions and teachers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.base.extras import check_installed
from rollouts.base.peft import CONFIG
from rollouts.base.terminal import say
from rollouts.commands.arguments import BROKEN, add_verb, check_run
from rollouts.commands.findings import say_first
from rollouts.errors import ConfigError, without_password
from rollouts.runs.logprobs import TOLERANCES, check_logprobs
from rollouts.runs.teacher_logprobs import check_teachers
from rollouts.runs.verify import verify_run

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    does = "do the laws hold on a stored run? With --model: its logprobs"
    parser = add_verb(verbs, "check-run", _verify, does, "check-run runs/a --model v1=weights/1 v2=weights/2")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--model",
        nargs="+",
        default=[],
        metavar="[VERSION=]DIR",
        help="compare every logprob with these weights (law 8); without VERSION, for all versions that have no other; "
        "SEAT=DIR for a seat whose replies another policy samples",
    )
    parser.add_argument(
        "--lora",
        nargs="+",
        default=[],
        metavar="VERSION=DIR",
        help="LoRA adapters of the run, for the base model of --model DIR",
    )
    parser.add_argument(
        "--teacher-model",
        nargs="+",
        default=[],
        metavar="[URL=]DIR",
        help="compare the logprobs of teachers with these weights (law 8); without URL, for all teachers that have no "
        "other",
    )
    parser.add_argument(
        "--dtype", choices=tuple(TOLERANCES), help="of the comparison (default: that of the weights in the first DIR)"
    )
    defaults = ", ".join(f"{value:g} in {name}" for name, value in TOLERANCES.items())
    parser.add_argument(
        "--tolerance", type=_tolerance, metavar="X", help=f"largest difference of a logprob (default: {defaults})"
    )


def _verify(args: argparse.Namespace) -> int:
    whole = _models(args.model)
    models = {**whole, **_adapters(args.lora, args.model)}
    teachers = _teachers(args.teacher_model)
    check_run(args.run)
    report = verify_run(args.run)
    say(report)
    violations = list(report.violations)
    if violations and (models or teachers):
        say("law 8 (logprobs): not checked, since another law is broken")
    else:
        settings = {"dtype": args.dtype, "tolerance": args.tolerance}
        if models:
            logprobs = check_logprobs(args.run, models, **settings)
            say(logprobs)
            violations += logprobs.violations
        if teachers:
            scored = check_teachers(args.run, teachers, whole, **settings)
            say(scored)
            violations += scored.violations
    say_first(violations, file=sys.stderr)
    return BROKEN if violations else 0


def _models(texts: Sequence[str]) -> dict[str | None, Path]:
    """The folder of each version; of ``None`` for all others."""
    models: dict[str | None, Path] = {}
    for text in texts:
        version, equals, folder = text.partition("=")
        name = version if equals and not Path(text).is_dir() else None
        path = Path(folder if name is not None else text)
        if name in models:
            raise ConfigError.of("--model", text, "one folder for each version")
        if not path.is_dir():
            raise ConfigError.of("--model", text, "a folder with a model, or VERSION=folder")
        models[name] = path
    if models:
        check_installed("--model", ("torch", "safetensors"), "engine")
    return models


def _teachers(texts: Sequence[str]) -> dict[str | None, Path]:
    """The folder of each teacher by its URL, which may have an ``=``; of ``None`` for all others."""
    teachers: dict[str | None, Path] = {}
    for text in texts:
        url, equals, folder = text.rpartition("=")
        name = without_password(url) if equals and not Path(text).is_dir() else None
        path = Path(folder if name is not None else text)
        if name in teachers or not path.is_dir():
            expected = "a folder with a model, or URL=folder, one for each teacher"
            raise ConfigError.of("--teacher-model", without_password(text), expected)
        teachers[name] = path
    if teachers:
        check_installed("--teacher-model", ("torch", "safetensors"), "engine")
    return teachers


def _adapters(texts: Sequence[str], models: Sequence[str]) -> dict[str | None, Path]:
    """The folder of each adapter."""
    found: dict[str | None, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not (equals and (Path(folder) / CONFIG).is_file()) or name in found:
            raise ConfigError.of("--lora", text, f"VERSION=folder with {CONFIG}, one for each version")
        found[name] = Path(folder)
    if found and None not in _models(models):
        raise ConfigError.of("--model", " ".join(models), "DIR, the base model of the adapters of --lora")
    return found


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}; expected a number >= 0")
    return value
