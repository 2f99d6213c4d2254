"""``rollouts view``: write a run, an evaluation, or two of them to compare, as one HTML file; or serve it live."""

from __future__ import annotations

import argparse
import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollouts.base.terminal import say
from rollouts.commands.arguments import add_verb, check_run, port
from rollouts.errors import ConfigError
from rollouts.renderer.tokenizer import local_decoder
from rollouts.runs.layout import check_output
from rollouts.views.page import open_source, write_view
from rollouts.views.page.live import LiveView, serving_view
from rollouts.views.page.payload import build_payload
from rollouts.views.page.source import Source

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "view", _view, "write a run as an HTML page, or serve an active run", "view runs/a")
    parser.add_argument("run", type=Path, nargs="+", metavar="RUN", help="folder of a run or an evaluation; one or two")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="the page (default: NAME_OF_RUN.html)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing pages")
    parser.add_argument("--serve", action="store_true", help="serve the page on 127.0.0.1, with changes as they come")
    parser.add_argument("--port", type=port, help="port of --serve (default: a free one)")
    parser.add_argument("--no-verify", action="store_true", help="do not check the laws, which reads the run once more")
    parser.add_argument("--tokenizer", metavar="NAME_OR_DIR", help="tokenizer (default: the run's)")


def _view(args: argparse.Namespace) -> int:
    if len(args.run) > 2:
        raise ConfigError.of("RUN", [str(run) for run in args.run], "one folder, or two to compare")
    for run in args.run:
        if not (run / "eval.json").is_file():
            check_run(run)
    openers = [functools.partial(open_source, run, verify=not (args.no_verify or args.serve)) for run in args.run]
    sources = [opener() for opener in openers]
    decoders = [_decoder(args.tokenizer or source.info.get("tokenizer")) for source in sources]
    if args.serve:
        if args.out is not None:
            raise ConfigError.of("--out", str(args.out), "no file with --serve")
        with serving_view(LiveView(openers, decoders), args.port or 0) as url:
            say(url, flush=True)
            threading.Event().wait()  # until Ctrl-C
    if args.port is not None:
        raise ConfigError.of("--port", args.port, "--serve with it")
    return _write(args, sources, decoders)


def _write(args: argparse.Namespace, sources: list[Source], decoders: list[Callable[[Any], str] | None]) -> int:
    out = args.out or Path(f"{args.run[0].resolve().name}.html")
    if out.suffix != ".html":
        raise ConfigError.of("--out", str(out), "a file FILE.html")
    check_output(out, "--out", overwrite=args.overwrite)
    payloads = [build_payload(source, decode) for source, decode in zip(sources, decoders, strict=True)]
    try:
        pages = write_view(payloads, out)
    except OSError as error:
        raise ConfigError.of("--out", str(out), f"a file that can be written ({error})") from error
    size, tokens = sum(page.stat().st_size for page in pages), sum(payload.tokens for payload in payloads)
    more = f", and {len(pages) - 1} more pages" if len(pages) > 1 else ""
    say(f"{out}{more}: {size / 1e6:.2f} MB for {tokens} tokens")
    return 0


def _decoder(tokenizer: Any) -> Callable[[Any], str] | None:
    try:
        return local_decoder(tokenizer)
    except ConfigError as error:
        say(f"ids instead of texts: {error}", file=sys.stderr)
        return None
