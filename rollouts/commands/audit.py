"""``rollouts audit``: judge a dump of another system by the laws of stored runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rollouts.audit import ModelTokens, Weights, audit, names, reader_of
from rollouts.base.extras import check_installed
from rollouts.base.terminal import say
from rollouts.commands.arguments import BROKEN, above_0, add_verb
from rollouts.commands.findings import say_first
from rollouts.errors import ConfigError
from rollouts.runs.logprobs import TOLERANCES

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    does = "do the laws hold on a dump of another system?"
    parser = add_verb(verbs, "audit", _audit, does, "audit debug/3.pt --format slime-pt --tokenizer models/qwen3")
    parser.add_argument("file", type=Path, metavar="FILE", help="the dump, or a folder of its files")
    parser.add_argument("--format", required=True, choices=tuple(names()), help="of the dump")
    parser.add_argument(
        "--tokenizer", metavar="NAME_OR_DIR", help="tokenizer of the model, for texts, roles and the vocabulary"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="compare every trained token's logprob with these weights (law 8)"
    )
    parser.add_argument(
        "--temperature", type=above_0, default=1.0, metavar="T", help="of the sampling, for --model (default: 1)"
    )
    parser.add_argument(
        "--dtype", choices=tuple(TOLERANCES), help="of the comparison of logprobs (default: that of the weights)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _audit(args: argparse.Namespace) -> int:
    reader = reader_of(args.format)
    if not args.file.exists():
        raise ConfigError.of("FILE", str(args.file), "a file, or a folder of files")
    model_tokens = None
    if args.tokenizer is not None:
        from rollouts.renderer import load_tokenizer  # here: it imports transformers

        model_tokens = ModelTokens(load_tokenizer(args.tokenizer))
    weights = None if args.model is None else _weights(args)
    report = audit(args.file, reader, model_tokens=model_tokens, weights=weights, dtype=args.dtype)
    if args.json:
        say(json.dumps(report.to_dict(), indent=2))
    else:
        say(report)
        for kind in ("broken", "unusual"):
            found = [finding for finding in report.findings if finding.kind == kind]
            say_first(found, f"more {kind} (--json lists them)")
    return 0 if report.ok else BROKEN


def _weights(args: argparse.Namespace) -> Weights:
    if not args.model.is_dir():
        raise ConfigError.of("--model", str(args.model), "a folder with a model")
    check_installed("--model", ("torch", "safetensors"), "engine")
    return Weights(args.model, args.dtype, args.temperature)
