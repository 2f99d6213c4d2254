"""``rollouts check-server``: ask a running server point by point for what a run relies on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from rollouts.base.terminal import say
from rollouts.commands.arguments import BROKEN, add_provider, add_verb, in_loop
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError
from rollouts.inference.conformance.points import Report, read_report, table
from rollouts.inference.conformance.sglang import conformance_of
from rollouts.inference.conformance.vllm import vllm_conformance_of

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    does = "does a server have what a run relies on, point by point?"
    parser = add_verb(verbs, "check-server", _conformance, does, "check-server --endpoint http://127.0.0.1:30000")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--endpoint",
        metavar="URL",
        help="an SGLang or vLLM server, or a router of SGLang, that serves nothing else meanwhile: it is paused, and "
        "its weights are loaded again. The keys are read from ROLLOUTS_API_KEY and ROLLOUTS_ADMIN_KEY",
    )
    what.add_argument(
        "--table", nargs="+", type=Path, metavar="FILE", help="print a Markdown table of reports stored with --json"
    )
    add_provider(parser)
    parser.add_argument("--unsafe", action="store_true", help="also ask what may end the server")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference of two logprobs of one token (default: 0.001 if the server reports float32, 0.05 if "
        "float16, else 0.5)",
    )
    parser.add_argument(
        "--idle-seconds", type=float, default=7.0, metavar="X", help="how long one connection stays idle (default: 7)"
    )


def _conformance(args: argparse.Namespace) -> int:
    if args.table:
        say(table([_stored(path) for path in args.table]))
        return 0
    endpoint = Endpoint(
        provider=args.provider or "sglang",
        base_url=args.endpoint,
        api_key=os.environ.get("ROLLOUTS_API_KEY"),
        admin_key=os.environ.get("ROLLOUTS_ADMIN_KEY"),
    )

    async def ask() -> Report:
        conformance = vllm_conformance_of if endpoint.provider == "vllm" else conformance_of
        return await conformance(endpoint, unsafe=args.unsafe, tolerance=args.tolerance, idle_seconds=args.idle_seconds)

    report = in_loop(ask)
    say(msgspec.json.format(msgspec.json.encode(report)).decode() if args.json else report)
    return BROKEN if report.failed else 0


def _stored(path: Path) -> Report:
    try:
        return read_report(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError.of("--table", str(path), f"a file ({error.strerror})") from error
